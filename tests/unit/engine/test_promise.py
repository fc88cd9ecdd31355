"""A promise tells how much of it the engine took; what calls took travels as counters."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.figures import TimeHistogram
from kvray.engine.meta import Promise
from kvray.engine.promises import Promises
from kvray.errors import LeaseExpired

BLOCK = 4
ARGS = SimpleNamespace(tokens_per_block=BLOCK, takes_offers_later=False)
SHARED = SimpleNamespace(args=ARGS)


def promise_of(*, first: int = 2, blocks: int = 5, **fields: Any) -> Promise:
    return Promise(prefix=None, first=first, end=first + blocks, **fields)


def test_an_engine_without_layer_groups_takes_all_or_nothing() -> None:
    promise = promise_of()
    assert promise.taken(2 * BLOCK, BLOCK, is_exact=True) == (5, True)
    assert promise.taken(-3 * BLOCK, BLOCK, is_exact=True) == (0, True)


@pytest.mark.parametrize(
    ("noted", "taken"), [(0, (0, True)), (12, (3, True)), (13, (4, False)), (99, (5, False))]
)
def test_an_engine_that_may_take_less_notes_it_at_the_request(
    noted: int, taken: tuple[int, bool]
) -> None:
    promise = promise_of(honoured=lambda: noted)
    assert promise.taken(2 * BLOCK, BLOCK, is_exact=False) == taken


def test_a_block_that_the_engine_has_in_part_counts_as_taken() -> None:
    promise = promise_of(honoured=lambda: 2)
    assert promise.taken(2 * BLOCK + 3, BLOCK, is_exact=False) == (2, False)


def test_without_such_a_note_all_may_have_been_taken() -> None:
    assert promise_of().taken(2 * BLOCK, BLOCK, is_exact=False) == (5, False)


def test_an_engine_that_counts_on_more_is_stopped() -> None:
    with pytest.raises(LeaseExpired, match="never promised"):
        promise_of().taken(12, BLOCK, is_exact=True)


def test_a_lost_promise_stops_only_the_engine_that_counts_on_it() -> None:
    promises = Promises()
    promises._lost[7] = 2
    promises.check(SHARED, 8, 40)
    promises.check(SHARED, 7, 2 * BLOCK)
    promises._lost[7] = 2
    with pytest.raises(LeaseExpired, match="earlier pass"):
        promises.check(SHARED, 7, 3 * BLOCK)
    promises._lost[7] = 2
    promises.forget(7)
    promises.check(SHARED, 7, 3 * BLOCK)


def test_lost_promises_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvray.engine.promises._LOST_MAX", 3)
    shared = SimpleNamespace(args=ARGS, release_prefix=lambda _: None)
    promises = Promises()
    for request_id in range(5):
        state = SimpleNamespace(request_id=request_id, promise=None)
        promises.keep(state, promise_of(first=0))
    promises.settle(shared)
    promises.check(shared, 1, 40)
    with pytest.raises(LeaseExpired):
        promises.check(shared, 2, 40)


def bound_of(name: str) -> float:
    return math.inf if name.endswith("inf") else float(name.rpartition("_")[2])


def test_nothing_observed_is_no_counter() -> None:
    assert TimeHistogram().counters("lease") == {}


def test_a_call_is_in_the_bucket_that_ends_above_it() -> None:
    timing = TimeHistogram()
    timing.observe(100_000)
    timing.observe(2**17)

    assert timing.counters("lease") == {
        "lease_ns_below_131072": 1,
        "lease_ns_below_262144": 1,
        "lease_us_sum": 231,
    }


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50))
def test_each_call_is_in_one_bucket_and_no_count_or_bound_is_lost(calls: list[int]) -> None:
    timing = TimeHistogram()
    for nanoseconds in calls:
        timing.observe(nanoseconds)

    counters = timing.counters("stage")

    buckets = {bound_of(name): n for name, n in counters.items() if "below" in name}
    assert sum(buckets.values()) == len(calls)
    assert len(buckets) <= 19
    for bound in buckets:
        below = sum(count for other, count in buckets.items() if other <= bound)
        assert below == sum(nanoseconds < bound for nanoseconds in calls)
    assert counters["stage_us_sum"] == round(sum(calls) / 1000)
