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
