from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.breaker import Breaker


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(Random(1))


def test_a_failure_opens_it_for_a_moment_and_then_one_call_may_try(breaker):
    assert breaker.state(10.0) == "closed"
    breaker.fail(10.0, "no answer")
    assert breaker.state(10.1) == "open"
    assert breaker.state(10.25) == "half-open"
    breaker.begin(10.25)
    assert breaker.state(10.25) == "open"
    breaker.succeed()
    assert (breaker.state(10.25), breaker.error) == ("closed", "")


def test_a_trial_that_fails_opens_it_for_longer(breaker):
    now, pauses = 0.0, []
    for _ in range(8):
        breaker.fail(now, "no answer")
        began = now
        while breaker.state(now) == "open":
            now += 0.01
        pauses.append(now - began)
        breaker.begin(now)
    for place, pause in enumerate(pauses):
        longest = min(8.0, 0.25 * 2**place)
        assert longest / 2 - 0.02 <= pause <= longest + 0.02


def test_calls_that_failed_together_count_once_and_a_trial_without_an_end_is_followed_by_another(
    breaker,
):
    for _ in range(20):
        breaker.fail(0.0, "no answer")
    assert breaker.state(0.26) == "half-open"
    breaker.begin(1.0)
    assert breaker.state(5.0) == "open"
    assert breaker.state(13.1) == "half-open"


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "succeed", "fail"]), st.floats(0, 20)), max_size=40
    )
)
def test_it_is_never_open_for_ever(steps):
    breaker, now = Breaker(Random(0)), 0.0
    for step, pause in steps:
        now += pause
        if step == "succeed":
            breaker.succeed()
        elif step == "fail":
            breaker.fail(now, "no answer")
        elif breaker.state(now) != "open":
            breaker.begin(now)
    assert breaker.state(now + 13.0) != "open"


def test_two_callers_come_back_at_different_times():
    one, other = Breaker(Random(1)), Breaker(Random(2))
    for breaker in (one, other):
        breaker.fail(0.0, "no answer")
    assert any(one.state(at / 1000) != other.state(at / 1000) for at in range(1000))
