"""A peer that does not answer is left alone, for longer each time."""

import itertools

import pytest

from kvray.node.breaker import Breaker


def test_a_new_breaker_is_closed() -> None:
    assert not Breaker(seed=1).is_open(0.0)


@pytest.mark.parametrize("seed", range(20))
def test_each_failure_opens_it_for_twice_as_long_up_to_a_bound(seed: int) -> None:
    breaker, now = Breaker(seed=seed), 100.0
    for expected_s in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        breaker.fail(now)
        assert breaker.is_open(now + 0.49 * expected_s)
        assert not breaker.is_open(now + 1.01 * expected_s)
        now += 20.0


def test_an_answer_starts_the_series_anew() -> None:
    breaker = Breaker(seed=1)
    for now in range(0, 100, 20):
        breaker.fail(float(now))
    breaker.succeed()
    breaker.fail(200.0)
    assert not breaker.is_open(200.0 + 0.25)


def test_two_engines_come_back_at_different_times() -> None:
    ends = []
    for seed in (1, 2):
        breaker = Breaker(seed=seed)
        breaker.fail(0.0)
        ends.append(next(at for at in itertools.count() if not breaker.is_open(at / 1000)))
    assert ends[0] != ends[1]
