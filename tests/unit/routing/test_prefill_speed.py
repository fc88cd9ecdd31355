"""The speed of an engine, from its answers."""

import pytest

from kvray.routing.prefill_speed import PrefillSpeed


def test_the_newest_answers_count_most() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s == 0.0
    speed.note(1000, 0.5)
    assert speed.tokens_per_s == 2000.0
    for _ in range(20):
        speed.note(1000, 0.1)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.01)


@pytest.mark.parametrize(("num_computed", "seconds"), [(10, 0.1), (0, 0.1), (1000, 0.0)])
def test_answers_that_tell_little_do_not_count(num_computed: int, seconds: float) -> None:
    speed = PrefillSpeed()
    speed.note(num_computed, seconds)
    assert speed.tokens_per_s == 0.0


def test_answers_under_way_slow_a_prefill_by_a_part_of_itself_each() -> None:
    speed = PrefillSpeed()
    speed.note(1000, 0.3, 2)
    assert speed.decode_slowdown == 0.0, "how fast it is alone is not known"
    speed.note(1000, 0.1)
    for _ in range(20):
        speed.note(1000, 0.14, 4)
    assert speed.decode_slowdown == pytest.approx(0.1, rel=0.01)
    assert speed.tokens_per_s == 10_000.0
    for _ in range(40):
        speed.note(1000, 0.05, 4)
    assert speed.decode_slowdown == pytest.approx(0.0, abs=1e-3)
