"""The engine's speed is measured from passes that follow one another, and from nothing else."""

import pytest

from kvray.engine.leader import PrefillRate


def run(rate: PrefillRate, *passes: tuple[set[int], int, float], at: float = 100.0) -> float:
    """Plan `passes` of (requests, tokens, seconds until the next)."""
    for requests, tokens, seconds in passes:
        rate.plan(requests, tokens, at)
        at += seconds
    return at


def test_nothing_is_known_at_first() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    run(rate, ({1}, 4000, 0.5))
    assert rate.tokens_per_s == 0.0


def test_a_large_pass_is_measured_until_the_next_is_planned() -> None:
    rate = PrefillRate()
    run(rate, ({1}, 4000, 0.5), ({1}, 1, 0.01), ({1}, 1, 0.01))
    assert rate.tokens_per_s == pytest.approx(8000)


def test_of_an_engine_that_overlaps_the_time_shows_one_pass_later() -> None:
    rate = PrefillRate()
    run(rate, ({1}, 4000, 0.001), ({1}, 1, 0.5), ({1}, 1, 0.01), ({1}, 1, 0.01))
    assert rate.tokens_per_s == pytest.approx(8000)


def test_chunks_of_one_prompt_are_measured_each() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1000, 0.1)] * 5)
    assert rate.tokens_per_s == pytest.approx(10_000)


def test_time_in_which_the_engine_had_nothing_to_do_does_not_count() -> None:
    rate = PrefillRate()
    at = run(rate, ({1}, 4000, 0.5), ({1}, 1, 0.01), ({1}, 1, 60.0))
    at = run(rate, ({2}, 4000, 30.0), at=at)
    run(rate, ({3}, 4000, 0.5), ({3}, 1, 0.01), ({3}, 1, 0.01), at=at)
    assert rate.tokens_per_s == pytest.approx(8000)


def test_small_passes_say_nothing() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1, 0.02)] * 9)
    assert rate.tokens_per_s == 0.0


def test_a_change_of_speed_is_noticed() -> None:
    rate = PrefillRate()
    at = run(rate, *[({1}, 1000, 0.1)] * 20)
    run(rate, *[({1}, 1000, 1.0)] * 20, at=at)
    assert rate.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1000, 0.0)] * 4)
    assert rate.tokens_per_s == 0.0
