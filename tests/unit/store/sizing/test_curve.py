"""The curve of a sample beside replays of everything."""

from pathlib import Path

import numpy as np
import pytest

from kvray.lab.replay.simulator import simulate
from kvray.store.sizing import TrafficSample, curve, result_of
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt
from tests.unit.store.sizing.prompts import SIZES, fed, sampled

BLOCKS = [100, 400, 1600]
each_policy = pytest.mark.parametrize("policy", ["gittins", "lru"])
each_excerpt = pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC, SESSIONS])


@each_policy
@pytest.mark.parametrize("nvme_blocks", [0, 500])
def test_a_curve_of_all_prompts_is_the_full_replay(policy: str, nvme_blocks: int) -> None:
    trace = excerpt(CONVERSATION)
    window = fed(TrafficSample(10_000), trace).window()
    options = {"policy": policy, "admission": "likely"}
    found = result_of(curve(window, BLOCKS, disk_bytes=nvme_blocks, **options))["one"]
    for at, blocks in enumerate(BLOCKS):
        full = simulate(trace, host_blocks=blocks, nvme_blocks=nvme_blocks, **options)
        assert found["host"][at] == pytest.approx(full.host_hit_blocks / full.refs, abs=1e-5)
        assert found["disk"][at] == pytest.approx(full.nvme_hit_blocks / full.refs, abs=1e-5)
    assert found["error"] == [0.0] * len(BLOCKS)


@each_excerpt
@each_policy
def test_a_curve_of_some_keys_is_near_the_full_replay(path: Path, policy: str) -> None:
    trace, errors, said = excerpt(path), [], []
    options = {"policy": policy, "admission": "all"}
    full = [simulate(trace, policy=policy, host_blocks=one).hit_ratio for one in BLOCKS]
    for seed in range(2):
        sample = fed(TrafficSample(1600, keys_max=trace.num_refs // 3), trace, seed)
        found = result_of(curve(sample.window(), BLOCKS, **options))["one"]
        assert found["rate"] <= 0.5
        errors.append(np.subtract(found["host"], full))
        said.append(found["error"])
    # The excerpts are short: of a few hundred blocks the sample can only say so much.
    assert np.abs(errors).mean() < 0.04
    assert np.abs(errors).mean() < 0.005 + 1.5 * np.mean(said), "it says how far off it may be"


@each_policy
def test_more_memory_finds_no_less_but_for_noise(policy: str) -> None:
    sample = fed(TrafficSample(1600, keys_max=3000), excerpt(SYNTHETIC))
    sizes = [50, 100, 200, 400, 800, 1600, 3200]
    found = result_of(curve(sample.window(), sizes, policy=policy, admission="all"))["one"]
    assert (np.diff(found["host"]) > -0.02).all()


def paths(count: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 2**64, length, dtype="u8") for _ in range(count)]


def test_blocks_of_answers_are_found_later_but_nobody_asks_for_them_before() -> None:
    sample = TrafficSample(10_000)
    first = paths(20, 20)
    sample.add("one", sampled(first, answers=10), **SIZES, now=1.0)
    sample.add("one", sampled(first), **SIZES, now=2.0)
    found = result_of(curve(sample.window(), [1000], policy="lru", admission="all"))["one"]
    assert found["sampled_blocks"] == 20 * (10 + 20)
    assert found["host"] == [pytest.approx(20 / 30, abs=1e-4)]


def test_what_engines_had_themselves_is_not_found_in_memory() -> None:
    sample = TrafficSample(10_000)
    prompts = sampled(paths(20, 20))
    sample.add("one", prompts, **SIZES, now=1.0)
    prompts.lengths[:, 2] = 5
    again = {"num_own": 100, "lengths": prompts.lengths}
    own = type(prompts)(**{**{n: getattr(prompts, n) for n in prompts.__slots__}, **again})
    sample.add("one", own, **SIZES, now=2.0)
    found = result_of(curve(sample.window(), [1000], policy="lru", admission="all"))["one"]
    assert found["own"] == pytest.approx(1 / 8, abs=1e-4)
    assert found["host"] == [pytest.approx(3 / 8, abs=1e-4)]


def test_namespaces_share_the_memory_by_bytes() -> None:
    sample = TrafficSample(10**9)
    large = {"block_bytes": 4, "tokens_per_block": 1}
    for now in range(6):
        for name, sizes, seed in (("small", SIZES, 1), ("large", large, 2)):
            numbers = np.random.default_rng(seed).integers(0, 2**64, (40, 50), dtype="u8")
            sample.add(name, sampled(list(numbers)), **sizes, now=float(now))
    window = sample.window()
    assert [space.rate for space in window.spaces] == [0.25, 1.0]
    # Together they have 40 x 50 x (1 + 4) bytes.
    found = result_of(curve(window, [2000, 10_600], policy="lru", admission="all"))
    for one in found.values():
        assert one["host"][0] < 0.1
        assert one["host"][1] > 0.75


def test_of_a_namespace_with_little_traffic_nothing_is_said() -> None:
    sample = TrafficSample(10_000)
    sample.add("one", sampled(paths(3, 20)), **SIZES, now=1.0)
    assert result_of(curve(sample.window(), [1000], policy="lru", admission="all")) == {}
    empty = TrafficSample(10_000).window()
    assert result_of(curve(empty, [1000], policy="lru", admission="all")) == {}
