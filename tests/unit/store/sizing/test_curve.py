"""The curve of a sample beside replays of everything; its bounds; its prompts on the wire."""

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.lab.replay.simulator import simulate
from kvray.store.sizing import SampledPrompts, TrafficSample, curve, result_of
from kvray.store.sizing.curve import judged
from kvray.store.sizing.prompts import LIMIT_MAX, sampled_lengths
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt
from tests.unit.store.sizing.prompts import SIZES, fed, paths_of, sampled

BLOCKS = [100, 400, 1600]
PATH = np.array([1, 2, 3], "u8")
each_policy = pytest.mark.parametrize("policy", ["gittins", "lru"])


@each_policy
@pytest.mark.parametrize("nvme_blocks", [0, 500])
def test_a_curve_of_all_prompts_is_the_full_replay(policy, nvme_blocks):
    trace = excerpt(CONVERSATION)
    window = fed(TrafficSample(10_000), trace).window(counted_share=1.0)
    options = {"policy": policy, "admission": "likely"}
    found = result_of(curve(window, BLOCKS, disk_bytes=nvme_blocks, **options))["one"]
    for at, blocks in enumerate(BLOCKS):
        full = simulate(trace, host_blocks=blocks, nvme_blocks=nvme_blocks, **options)
        assert found["host"][at] == pytest.approx(full.host_hit_blocks / full.refs, abs=1e-5)
        assert found["disk"][at] == pytest.approx(full.nvme_hit_blocks / full.refs, abs=1e-5)
    assert found["error"] == [0.0] * len(BLOCKS)


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC, SESSIONS])
@each_policy
def test_a_curve_of_some_keys_is_near_the_full_replay(path, policy):
    trace, errors, said = excerpt(path), [], []
    options = {"policy": policy, "admission": "all"}
    full = [simulate(trace, policy=policy, host_blocks=one).hit_ratio for one in BLOCKS]
    for seed in range(2):
        sample = fed(TrafficSample(1600, keys_max=trace.num_refs // 3), trace, seed)
        window = sample.window(counted_share=1.0)
        found = result_of(curve(window, BLOCKS, **options))["one"]
        assert found["rate"] <= 0.5
        errors.append(np.subtract(found["host"], full))
        said.append(found["error"])
    # The excerpts are short: of a few hundred blocks the sample can only say so much.
    assert np.abs(errors).mean() < 0.04
    assert np.abs(errors).mean() < 0.005 + 1.5 * np.mean(said), "it says how far off it may be"


def random_paths(count: int, length: int, seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**64, length, dtype="u8") for _ in range(count)]


def found_by(sample: TrafficSample, sizes: list[int], **which: float) -> dict[str, Any]:
    return result_of(curve(sample.window(**which), sizes, policy="lru", admission="all"))


def test_blocks_of_answers_are_found_later_but_nobody_asks_for_them_before():
    sample = TrafficSample(10_000)
    first = random_paths(20, 20)
    sample.add("one", sampled(first, answers=10), **SIZES, now=1.0)
    sample.add("one", sampled(first), **SIZES, now=2.0)
    found = found_by(sample, [1000], counted_share=1.0)["one"]
    assert found["sampled_blocks"] == 20 * (10 + 20)
    assert found["host"] == [pytest.approx(20 / 30, abs=1e-4)]


def test_what_engines_had_themselves_is_not_found_in_memory():
    sample = TrafficSample(10_000)
    prompts = sampled(random_paths(20, 20))
    sample.add("one", prompts, **SIZES, now=1.0)
    prompts.lengths[:, 2] = 5
    sample.add(
        "one",
        replace(prompts, num_own=100, num_hit=200, num_disk=20, num_remote=40),
        **SIZES,
        now=2.0,
    )
    found = found_by(sample, [1000])["one"]
    shares = {"own": 1 / 4, "measured": 3 / 4, "could": 1.0}
    shares |= {"from_disk": 1 / 20, "from_others": 1 / 10}
    assert {name: found[name] for name in shares} == pytest.approx(shares, abs=1e-4)
    assert found["host"] == [pytest.approx(3 / 4, abs=1e-4)]


def test_a_memory_that_fills_does_not_count_but_fills_the_small_ones():
    sample = TrafficSample(10_000)
    for now in range(4):
        sample.add("one", sampled(random_paths(20, 20)), **SIZES, now=float(now))
    assert found_by(sample, [1000], counted_share=1.0)["one"]["host"] == [pytest.approx(0.75)]
    assert found_by(sample, [1000])["one"]["host"] == [pytest.approx(1.0)]


CURVE = {"own": 0.1, "could": 0.9, "host": [0.1, 0.3, 0.4], "disk": [0.2, 0.1, 0.1]}


@pytest.mark.parametrize(
    ("measured", "disk", "others", "error", "sure"),
    [
        (0.50, 0.1, 0.0, [0.05, 0.01, 0.01], True),
        (0.53, 0.1, 0.0, [0.065, 0.015, 0.015], True),
        (0.46, 0.1, 0.0, [0.07, 0.02, 0.02], False),
        (0.53, 0.1, 0.04, [0.0667, 0.01, 0.01], True),
        (0.40, 0.0, 0.0, [0.05, 0.01, 0.01], True),
    ],
    ids=["as counted", "a little off", "too far off", "other nodes", "a disk that gave nothing"],
)
def test_a_curve_is_held_against_what_was_counted(measured, disk, others, error, sure):
    told = {**CURVE, "measured": measured, "from_disk": disk, "from_others": others}
    found = judged({**told, "error": [0.01] * 3}, 1)
    assert (found["disk"][1], found["remote"][1]) == (disk, others), "as counted"
    assert found["predicted"] == pytest.approx(0.4 + disk + others)
    assert found["error"] == pytest.approx(error, abs=1e-4)
    assert 2 * found["error"][1] >= abs(found["predicted"] - measured) - 1e-6
    assert found["is_sure"] is sure


def test_disk_and_other_nodes_change_with_the_memory():
    told = {**CURVE, "measured": 0.54, "from_disk": 0.1, "from_others": 0.04, "error": [0.0] * 3}
    found = judged(told, 1)
    assert found["disk"] == pytest.approx([0.2, 0.1, 0.1])
    # They have a tenth of what is missed, a third of that with a third of the hits, and so on.
    assert found["remote"] == pytest.approx([0.5 / 30, 0.04, 0.3 * 0.4 / 3], abs=1e-4)
    beyond = judged({**told, "disk": [0.9, 0.1, 0.0], "from_disk": 0.05}, 1)
    assert beyond["disk"] == pytest.approx([0.7, 0.05, 0.0]), "what is missed, and no less than 0"


def test_namespaces_share_the_memory_by_bytes():
    sample = TrafficSample(10**9)
    large = {"block_bytes": 4, "tokens_per_block": 1}
    for now in range(6):
        for name, sizes, seed in (("small", SIZES, 1), ("large", large, 2)):
            sample.add(name, sampled(random_paths(40, 50, seed)), **sizes, now=float(now))
    assert [space.rate for space in sample.window().spaces] == [0.25, 1.0]
    limits = [sample.limit("small", block_bytes=1), sample.limit("large", block_bytes=4)]
    assert limits == [2**62 - 1, LIMIT_MAX], "a key stands for the same bytes in both"
    # Together they have 40 x 50 x (1 + 4) bytes.
    for one in found_by(sample, [2000, 10_600], counted_share=1.0).values():
        assert one["host"][0] < 0.1
        assert one["host"][1] > 0.75


def test_of_a_namespace_with_little_traffic_nothing_is_said():
    sample = TrafficSample(10_000)
    sample.add("one", sampled(random_paths(3, 20)), **SIZES, now=1.0)
    assert found_by(sample, [1000]) == found_by(TrafficSample(10_000), [1000]) == {}


@pytest.mark.parametrize("keys_max", [None, 2000])
def test_a_sample_has_every_use_of_all_blocks_or_of_fewer(keys_max):
    trace = excerpt(CONVERSATION)
    bound = {} if keys_max is None else {"keys_max": keys_max}
    window = fed(TrafficSample(10_000, **bound), trace).window(counted_share=1.0)
    (space,) = window.spaces
    limit = int(space.rate * 2**64) - 1
    expected = [path[path <= limit] for path in paths_of(trace)]
    assert window.names[window.trace.ids].tolist() == np.concatenate(expected).tolist()
    assert 0 < space.rate <= 1
    assert (space.rate == 1) is (keys_max is None)
    assert (space.num_blocks, window.counted_from) == (pytest.approx(trace.num_refs, 0.02), 0)
    assert (window.trace.depths[window.trace.ids[window.trace.starts[:-1]]] == 0).all()
    for name in () if keys_max else ("starts", "ids", "parents", "depths"):
        assert getattr(window.trace, name).tolist() == getattr(trace, name).tolist(), name


def test_a_sample_of_a_small_memory_lets_the_oldest_prompts_go():
    trace = excerpt(CONVERSATION)
    window = fed(TrafficSample(100, keys_max=2000), trace).window()
    (space,) = window.spaces
    assert space.rate == 1, "thinner, it would have too few blocks"
    assert window.counted_from == window.trace.num_requests // 2 > 0
    latest = window.trace.num_requests - window.counted_from
    assert space.num_blocks == trace.starts[-1] - trace.starts[-1 - latest]


def test_a_window_may_be_thinner_than_the_sample():
    trace = excerpt(CONVERSATION)
    sample = fed(TrafficSample(10_000), trace)
    window = sample.window(100)
    assert 0 < window.trace.num_requests <= 100
    assert window.spaces[0].rate < 1
    assert sample.window().trace.num_refs == trace.num_refs


def test_a_block_that_grows_as_ranks_register_begins_the_namespace_again():
    sample = TrafficSample(1000)
    sample.add("one", sampled([PATH]), **SIZES, now=1.0)
    sample.add("one", sampled([]), block_bytes=2, tokens_per_block=1, now=2.0)
    window = sample.window()
    assert (window.trace.num_refs, window.spaces[0].num_blocks) == (0, 0)


def test_a_namespace_too_many_is_lost_till_one_of_which_nothing_comes_makes_room():
    sample = TrafficSample(1000)
    for at in range(64):
        sample.add(f"{at}", sampled([PATH]), **SIZES, now=float(at))
    for at in range(1100):
        sample.add("new", sampled([PATH]), **SIZES, now=100.0 + at)
    assert 900 < sample.num_lost < 1024
    window = sample.window()
    assert [space.name for space in window.spaces] == ["new", *(f"{at}" for at in range(1, 64))]
    assert (window.space_of == 0).sum() == 1100 - sample.num_lost


reports = st.tuples(
    st.integers(0, 3),  # the namespace
    st.integers(1, 5000),  # bytes of its blocks
    st.lists(st.integers(1, 60), max_size=30),  # keys of each prompt
    st.floats(0, 100),  # when
)


@settings(max_examples=60, deadline=None)
@given(st.lists(reports, max_size=30), st.integers(1, 10**6))
def test_it_stays_bounded_and_whole_whatever_comes(reports, capacity):
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


@given(st.binary(max_size=200))
def test_bytes_that_are_no_sample_are_refused(packed):
    with pytest.raises(ConfigError):
        SampledPrompts.unpack(packed)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, -1),
        (0, 5),  # keys above the limit
        (1, -1),
        (2, "many"),
        (8, np.array([np.nan] * 9, "<f4").tobytes()),
        (9, b"123"),
        (9, np.array([[2, 3, 0]] * 9, "<u4").tobytes()),
        (10, b""),
        (10, None),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(at, value):
    fields = list(msgpack.unpackb(sampled([np.array([7, 2**50], "u8")] * 9).pack()))
    fields[at] = value
    with pytest.raises(ConfigError):
        SampledPrompts.unpack(msgpack.packb(fields))


@given(st.lists(st.integers(1, 6), max_size=12), st.randoms(use_true_random=False))
def test_lengths_of_a_thinner_sample_are_those_of_its_keys(counts, rng):
    lengths = np.array([(n, n - n // 3, n // 4) for n in counts], dtype=np.int64).reshape(-1, 3)
    mask = np.array([rng.random() < 0.5 for _ in range(sum(counts))], dtype=bool)  # type: ignore[attr-defined]
    expected, start = [], 0
    for row in lengths.tolist():
        expected.append([int(mask[start : start + one].sum()) for one in row])
        start += row[0]
    assert sampled_lengths(lengths, mask).tolist() == expected
