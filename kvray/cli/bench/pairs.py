"""Interleaved pairs, ours and the floor in turn, and what follows from them: plain functions."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One timed piece of work, perhaps of several processes at once."""

    seconds: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same work done by kvray and bare, one right after the other."""

    ours: Timing
    floor: Timing


def measure(
    count: int, *, ours: Callable[[int], Timing], floor: Callable[[int], Timing], first: int = 0
) -> list[Pair]:
    """Return `count` pairs; both are told which pair it is, counted from `first`.

    Who goes first takes turns, so that neither finds the warmer caches.
    """
    pairs = []
    for index in range(first, first + count):
        if index % 2:
            earlier = ours(index)
            pairs.append(Pair(ours=earlier, floor=floor(index)))
        else:
            earlier = floor(index)
            pairs.append(Pair(ours=ours(index), floor=earlier))
    return pairs


def speed_ratio(pairs: Sequence[Pair]) -> float:
    """Return the median of kvray's speed over the floor's, pair by pair: at best about 1."""
    return statistics.median(pair.floor.seconds / pair.ours.seconds for pair in pairs)


def time_ratio(pairs: Sequence[Pair]) -> float:
    """Return the median of kvray's time over the floor's, pair by pair: at least about 1."""
    return statistics.median(pair.ours.seconds / pair.floor.seconds for pair in pairs)


def median_s(timings: Sequence[Timing]) -> float:
    """Return the median duration."""
    return statistics.median(timing.seconds for timing in timings)


def percentile_s(timings: Sequence[Timing], percent: float) -> float:
    """Return the smallest duration that `percent` of the timings do not exceed."""
    ordered = sorted(timing.seconds for timing in timings)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def over_all(timings: Sequence[tuple[float, float, float]]) -> Timing:
    """Return the timing of several processes: from the first that began to the last that ended.

    Args:
        timings: (began, ended, CPU seconds) of each, by one clock.
    """
    return Timing(
        seconds=max(ended for _, ended, _ in timings) - min(began for began, _, _ in timings),
        cpu_s=sum(cpu_s for _, _, cpu_s in timings),
    )
