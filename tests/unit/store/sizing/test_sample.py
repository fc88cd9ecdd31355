"""A sample of traffic: bounded, and at each moment the blocks below its limit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.store.sizing import SampledPrompts, TrafficSample
from kvray.store.sizing.prompts import LIMIT_MAX
from tests.unit.lab.replay.excerpts import CONVERSATION, excerpt
from tests.unit.store.sizing.prompts import SIZES, fed, paths_of, sampled


def test_with_room_for_all_it_is_the_trace_itself() -> None:
    trace = excerpt(CONVERSATION)
    window = fed(TrafficSample(10_000), trace).window()
    for name in ("starts", "ids", "parents", "depths"):
        assert getattr(window.trace, name).tolist() == getattr(trace, name).tolist(), name
    assert window.spaces[0].rate == 1
    assert window.spaces[0].num_blocks == trace.num_refs
    assert window.counted_from == 0


def test_a_full_sample_has_every_use_of_fewer_blocks() -> None:
    trace = excerpt(CONVERSATION)
    sample = fed(TrafficSample(10_000, keys_max=2000), trace)
    window = sample.window()
    (space,) = window.spaces
    limit = int(space.rate * 2**64) - 1
    expected = [path[path <= limit] for path in paths_of(trace)]
    assert window.names[window.trace.ids].tolist() == np.concatenate(expected).tolist()
    assert 0 < space.rate < 1
    assert space.num_blocks == trace.num_refs
    assert (window.trace.depths[window.trace.ids[window.trace.starts[:-1]]] == 0).all()


def test_a_sample_of_a_small_memory_lets_the_oldest_prompts_go() -> None:
    trace = excerpt(CONVERSATION)
    window = fed(TrafficSample(100, keys_max=2000), trace).window()
    (space,) = window.spaces
    assert space.rate == 1, "thinner, it would have too few blocks"
    assert window.counted_from == window.trace.num_requests // 2 > 0
    latest = window.trace.num_requests - window.counted_from
    assert space.num_blocks == trace.starts[-1] - trace.starts[-1 - latest]


def test_a_window_may_be_thinner_than_the_sample() -> None:
    trace = excerpt(CONVERSATION)
    sample = fed(TrafficSample(10_000), trace)
    window = sample.window(100)
    assert 0 < window.trace.num_requests <= 100
    assert window.spaces[0].rate < 1
    assert sample.window().trace.num_refs == trace.num_refs


def test_a_key_stands_for_the_same_bytes_in_every_namespace() -> None:
    sample = TrafficSample(1 << 30)
    path = np.array([1, 2, 3], "u8")
    assert sample.limit("small", block_bytes=100) == LIMIT_MAX
    sample.add("small", sampled([path]), block_bytes=100, tokens_per_block=1, now=1.0)
    assert sample.limit("large", block_bytes=400) == LIMIT_MAX
    sample.add("large", sampled([path]), block_bytes=400, tokens_per_block=1, now=1.0)
    assert sample.limit("small", block_bytes=100) == 2**62 - 1
    assert [space.rate for space in sample.window().spaces] == [0.25, 1.0]


def test_prompts_of_a_thinner_sample_than_wanted_are_lost_and_counted() -> None:
    sample = TrafficSample(1000)
    path = np.array([1, 2, 3], "u8")
    sample.add("one", sampled([path, path], limit=10), **SIZES, now=1.0)
    assert (sample.num_lost, sample.num_seen) == (2, 0)


def test_a_block_that_grows_as_ranks_register_begins_the_namespace_again() -> None:
    sample = TrafficSample(1000)
    path = np.array([1, 2, 3], "u8")
    sample.add("one", sampled([path]), **SIZES, now=1.0)
    sample.add("one", sampled([]), block_bytes=2, tokens_per_block=1, now=2.0)
    window = sample.window()
    assert (window.trace.num_refs, window.spaces[0].num_blocks) == (0, 0)


def test_of_too_many_namespaces_the_last_are_counted_as_lost() -> None:
    sample = TrafficSample(1000)
    path = np.array([1, 2, 3], "u8")
    for at in range(100):
        sample.add(f"{at}", sampled([path]), **SIZES, now=float(at))
    assert sample.num_lost == 36
    assert len(sample.window().spaces) == 64


reports = st.tuples(
    st.integers(0, 3),  # the namespace
    st.integers(1, 5000),  # bytes of its blocks
    st.lists(st.integers(1, 60), max_size=30),  # keys of each prompt
    st.floats(0, 100),  # when
)


@settings(max_examples=60, deadline=None)
@given(st.lists(reports, max_size=30), st.integers(1, 10**6))
def test_it_stays_bounded_and_whole_whatever_comes(
    reports: list[tuple[int, int, list[int], float]], capacity: int
) -> None:
    sample = TrafficSample(capacity, keys_max=300, prompts_max=50)
    rng, before = np.random.default_rng(0), sample.num_bytes
    for number, block_bytes, counts, now in reports:
        sizes = {"block_bytes": block_bytes, "tokens_per_block": 4}
        limit = sample.limit(str(number), block_bytes=block_bytes)
        paths = [rng.integers(0, 2**64, count, dtype="u8") for count in counts]
        prompts = sampled(paths, limit=limit)
        sample.add(str(number), SampledPrompts.unpack(prompts.pack()), **sizes, now=now)
        window = sample.window()
        assert window.trace.num_refs <= 300
        assert window.trace.num_requests <= 50
        assert sample.num_bytes == before
        assert window.lengths[:, 0].sum() == window.trace.num_refs
        assert (np.diff(window.trace.times) >= 0).all()
        rates = np.array([space.rate for space in window.spaces])
        kept = np.repeat(rates[window.space_of], window.lengths[:, 0]) * 2.0**64
        assert (window.names[window.trace.ids] <= kept).all()
