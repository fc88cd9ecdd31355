"""Notes on requests, as they travel, and runs of blocks by how they came to a node."""

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.trace.arrival import (
    ARRIVALS_MAX,
    HERE,
    Arrival,
    Arrivals,
    arrivals_of,
    joined,
    runs_between,
)
from kvray.trace.request_note import KEYS_MAX, RequestNote, pack, sampled, unpack
from tests.unit.store.small_arena import chain

NOTE = RequestNote(7, 1.7e9, 100, 4, 1, 3, 24, "not_stored", name="chatcmpl-7")
NOTE = NOTE._replace(arrivals=(Arrival(3, "nixl", "kvray-shard-b"),), stage_s=0.01, lease_s=0.001)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "7"},
        {"wanted": -1},
        {"tokens_per_block": 0},
        {"reason": "x" * 100},
        {"arrivals": ((1, 2),)},
        {"at": None},
        {"at": float("nan")},
        {"at": 1e300},
        {"stage_s": float("inf")},
        {"lease_s": float("nan")},
        {"step": 2**31},
        {"name": 7},
        {"keys": (b"x" * 31,)},
    ],
)
def test_a_note_with_a_wrong_value_is_refused(change):
    with pytest.raises(ConfigError, match="no note on a request"):
        unpack(pack(NOTE._replace(**change)))


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_note_comes_out_with_some_missing_keys_the_first_one_first(count, end):
    keys = chain(count)
    step, some = sampled(keys, min(end, count))
    assert len(some) <= KEYS_MAX
    assert list(some) == keys[min(end, count) :: step]
    note = NOTE._replace(step=step, keys=some)
    assert unpack(pack(note)) == note


@given(st.binary(max_size=200))
@example(None)
@example(3)
@example("text")
@example(b"x" * 20_000)
@example(msgpack.packb([1, 2]))
@example(msgpack.packb((*NOTE[:-1], "x" * 32)))
@example(msgpack.packb((*NOTE[:-1], ["x"] * 32)))
@example(msgpack.packb((*NOTE[:-1], None)))
def test_what_is_no_note_is_refused(junk):
    with pytest.raises(ConfigError, match=r"(no|A) note on a request"):
        unpack(junk)


WAYS = st.lists(st.sampled_from([None, ("nvme", ""), ("nixl", "b"), ("nixl", "c")]), max_size=30)


def ways_of(arrivals: Arrivals, count: int) -> list[tuple[str, str]]:
    """Return (way, source) of each of the first `count` blocks."""
    return [
        (way, source)
        for start, stop, way, source in runs_between(arrivals, 0, count)
        for _ in range(start, stop)
    ]


@given(WAYS)
def test_runs_say_of_each_block_how_it_came(ways):
    told = arrivals_of(ways)
    assert ways_of(told, len(ways)) == [one or (HERE, "") for one in ways]
    assert bool(told) == any(ways), "what was there is not told"


def test_runs_between_begin_and_end_where_they_are_asked_to():
    arrivals = (Arrival(4, HERE), Arrival(8, "nvme"), Arrival(12, "nixl", "b"))
    assert list(runs_between(arrivals, 6, 14)) == [
        (6, 8, "nvme", ""),
        (8, 12, "nixl", "b"),
        (12, 14, HERE, ""),
    ]
    assert list(runs_between(arrivals, 1, 3)) == [(1, 3, HERE, "")]


@given(WAYS, WAYS)
def test_what_the_first_stage_brought_was_brought(first, second):
    count = max(len(first), len(second))
    padded = [(ways + [None] * count)[:count] for ways in (first, second)]
    merged = joined(arrivals_of(first), arrivals_of(second))
    assert ways_of(merged, count) == [
        one or two or (HERE, "") for one, two in zip(*padded, strict=True)
    ]


def test_runs_are_bounded_and_still_end_where_they_did():
    ways = [("nvme", "") if block % 2 else None for block in range(500)]
    told = arrivals_of(ways)
    assert len(told) == ARRIVALS_MAX
    assert told[-1].stop == 500
    assert len(joined(told, told)) <= ARRIVALS_MAX
