"""Runs of blocks by how they came to a node."""

from hypothesis import given
from hypothesis import strategies as st

from kvray.trace.arrival import (
    ARRIVALS_MAX,
    HERE,
    Arrival,
    Arrivals,
    arrivals_of,
    joined,
    runs_between,
)

WAYS = st.lists(st.sampled_from([None, ("nvme", ""), ("nixl", "b"), ("nixl", "c")]), max_size=30)


def ways_of(arrivals: Arrivals, count: int) -> list[tuple[str, str]]:
    """Return (way, source) of each of the first `count` blocks."""
    return [
        (way, source)
        for start, stop, way, source in runs_between(arrivals, 0, count)
        for _ in range(start, stop)
    ]


@given(WAYS)
def test_runs_say_of_each_block_how_it_came(ways: list[tuple[str, str] | None]) -> None:
    assert ways_of(arrivals_of(ways), len(ways)) == [one or (HERE, "") for one in ways]


def test_what_was_there_is_not_told() -> None:
    assert arrivals_of([None] * 5) == ()


def test_runs_between_begin_and_end_where_they_are_asked_to() -> None:
    arrivals = (Arrival(4, HERE), Arrival(8, "nvme"), Arrival(12, "nixl", "b"))
    assert list(runs_between(arrivals, 6, 14)) == [
        (6, 8, "nvme", ""),
        (8, 12, "nixl", "b"),
        (12, 14, HERE, ""),
    ]
    assert list(runs_between(arrivals, 1, 3)) == [(1, 3, HERE, "")]


@given(WAYS, WAYS)
def test_what_the_first_stage_brought_was_brought(
    first: list[tuple[str, str] | None], second: list[tuple[str, str] | None]
) -> None:
    count = max(len(first), len(second))
    padded = [(ways + [None] * count)[:count] for ways in (first, second)]
    merged = joined(arrivals_of(first), arrivals_of(second))
    assert ways_of(merged, count) == [
        one or two or (HERE, "") for one, two in zip(*padded, strict=True)
    ]


def test_runs_are_bounded_and_still_end_where_they_did() -> None:
    ways = [("nvme", "") if block % 2 else None for block in range(500)]
    told = arrivals_of(ways)
    assert len(told) == ARRIVALS_MAX
    assert told[-1].stop == 500
    assert len(joined(told, told)) <= ARRIVALS_MAX
