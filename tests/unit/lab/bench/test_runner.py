"""Interleaved pairs and the figures that follow from them."""

from kvray.lab.bench.runner import (
    Duration,
    Pair,
    measure,
    median_s,
    over_all,
    percentile_s,
    speed_ratio,
    time_ratio,
)


def pair(ours: float, floor: float) -> Pair:
    return Pair(ours=Duration(seconds=ours), floor=Duration(seconds=floor))


def test_who_goes_first_takes_turns() -> None:
    steps: list[str] = []

    def step(name: str, seconds: float, index: int) -> Duration:
        steps.append(f"{name}{index}")
        return Duration(seconds=seconds)

    pairs = measure(
        3, ours=lambda index: step("ours", 2, index), floor=lambda index: step("floor", 1, index)
    )
    assert steps == ["floor0", "ours0", "ours1", "floor1", "floor2", "ours2"]
    assert pairs == [pair(2, 1)] * 3


def test_ratio_is_the_median_of_the_pairs_and_not_that_of_the_medians() -> None:
    pairs = [pair(1, 1), pair(2, 4), pair(8, 2)]
    assert speed_ratio(pairs) == 1
    assert time_ratio(pairs) == 1
    assert time_ratio([pair(3, 2)]) == 1.5
    assert speed_ratio([pair(2, 1)]) == 0.5


def test_percentile_is_one_of_the_timings() -> None:
    timings = [Duration(seconds=seconds) for seconds in (5, 1, 4, 2, 3)]
    assert median_s(timings) == 3
    assert percentile_s(timings, 99) == 5
    assert percentile_s(timings, 60) == 3
    assert percentile_s(timings, 0) == 1
    assert percentile_s([Duration(seconds=n) for n in range(1, 201)], 99) == 198


def test_several_processes_are_timed_from_the_first_start_to_the_last_end() -> None:
    assert over_all([(1, 4, 0.5), (2, 6, 1.5)]) == Duration(seconds=5, cpu_s=2)
