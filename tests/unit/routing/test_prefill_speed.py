"""The speed of an engine, from its answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing.cost import PrefillSpeed


def test_newer_answers_count_more() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s == 0.0
    speed.note(1000, 0.5, 0)
    assert speed.tokens_per_s == pytest.approx(2000.0)
    for _ in range(150):
        speed.note(1000, 0.1, 0)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.01)


@pytest.mark.parametrize(("num_computed", "seconds"), [(10, 0.1), (0, 0.1), (1000, -0.1)])
def test_answers_that_tell_little_do_not_count(num_computed: int, seconds: float) -> None:
    speed = PrefillSpeed()
    speed.note(num_computed, seconds, 0)
    assert (speed.tokens_per_s, speed.decode_slowdown) == (0.0, 0.0)


def test_prompts_of_one_pass_share_its_time() -> None:
    speed = PrefillSpeed()
    for _ in range(10):
        for seconds in (0.5, 0.0, 0.0, 0.0, 0.0):
            speed.note(1000, seconds, 0)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.3)


def test_answers_under_way_slow_a_prefill_by_a_part_of_itself_each() -> None:
    speed = PrefillSpeed()
    for number in range(100):
        speed.note(1000, 0.1 * (1 + 0.1 * (number % 20)), number % 20)
    assert speed.decode_slowdown == pytest.approx(0.1, rel=0.1)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.1)
    for number in range(200):
        speed.note(1000, 0.05, number % 20)
    assert speed.decode_slowdown == pytest.approx(0.0, abs=1e-2)


def test_a_slowdown_is_believed_as_far_as_the_answers_varied() -> None:
    speed = PrefillSpeed()
    for number in range(100):
        speed.note(1000, 0.1 * (1 + 0.1 * (number % 3)), number % 3)
    assert 0.02 < speed.decode_slowdown < 0.06
    assert (1 + speed.decode_slowdown) / speed.tokens_per_s == pytest.approx(0.00011, rel=0.01)


def test_what_answers_cost_does_not_show_while_they_are_always_as_many() -> None:
    speed = PrefillSpeed()
    for _ in range(3):
        speed.note(1000, 0.2, 3)
    assert speed.tokens_per_s == pytest.approx(5000.0)
    assert speed.decode_slowdown == pytest.approx(0.0, abs=1e-9)


_notes = st.tuples(st.integers(0, 10_000), st.floats(0, 100), st.integers(0, 64))


@given(st.lists(_notes, max_size=60))
def test_a_speed_is_never_negative_and_a_slowdown_bounded(
    notes: list[tuple[int, float, int]],
) -> None:
    speed = PrefillSpeed()
    for note in notes:
        speed.note(*note)
        assert speed.tokens_per_s >= 0
        assert 0 <= speed.decode_slowdown <= 2.0 + 1e-6
