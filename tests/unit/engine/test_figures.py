"""What calls took travels as counters that never fall."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.figures import TimeHistogram


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
