"""The simulator beside LRU in plain Python, the bounds, and what its own tables say."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvray.lab.replay import Outcome, Trace, belady, infinite
from kvray.lab.replay.reading import TraceBuilder
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES, Announced, simulate
from kvray.store import policy as policies
from kvray.store.arena.tables import Array
from kvray.store.policy import Everything
from kvray.store.replay import Replay
from kvray.store.replay.replay import NOWHERE
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt
from tests.unit.lab.replay.lru import lru_hits

EXCERPTS = (CONVERSATION, SYNTHETIC, SESSIONS)
SIZES = (100, 1000, 3000)

each_excerpt = pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.name.split(".")[0])
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_admission = pytest.mark.parametrize("admission", ADMISSIONS)


def random_trace(seed: int, *, num_requests: int = 250) -> Trace:
    """Return requests that go down a tree, go on with one another, and come again."""
    rng = random.Random(seed)
    builder = TraceBuilder(name="random", block_tokens=4)
    paths: list[list[int]] = [[0]]
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(0.3)
        before = rng.choice(paths[-30:])
        path = before if rng.random() < 0.6 else before[: rng.randrange(1, len(before) + 1)]
        while len(path) < 14 and rng.random() < 0.7:
            path = [*path, path[-1] * 5 + rng.randrange(1, 6)]
        paths.append(path)
        builder.add(time_s=now, num_tokens=4 * len(path) - rng.randrange(4), ids=path)
    return builder.build()


@cache
def on_host(path: Path, policy: str, num_blocks: int) -> Outcome:
    """Return what one tier finds of an excerpt; several tests look at it."""
    return simulate(excerpt(path), policy=policy, host_blocks=num_blocks)


def timeless(outcome: Outcome) -> Outcome:
    return replace(outcome, seconds=0.0)


# -- beside LRU, Belady and the infinite cache --------------------------------------------------


@each_excerpt
@pytest.mark.parametrize("nvme_blocks", [0, 500])
def test_lru_finds_in_memory_what_lru_finds_of_every_request(path: Path, nvme_blocks: int) -> None:
    trace = excerpt(path)
    for num_blocks in SIZES:
        replay = Replay(trace, "lru", num_blocks, nvme_blocks=nvme_blocks)
        finish(replay)
        assert replay.host_hits.tolist() == lru_hits(trace, num_blocks)


def finish(replay: Replay) -> None:
    for _ in replay.run():
        pass


@each_excerpt
@each_policy
def test_no_policy_beats_belady(path: Path, policy: str) -> None:
    for num_blocks in SIZES:
        found = on_host(path, policy, num_blocks)
        assert 0 < found.hit_blocks <= belady(excerpt(path), num_blocks).hit_blocks


@each_policy
@each_admission
def test_two_tiers_do_not_beat_belady_with_one_as_large_as_both(
    policy: str, admission: str
) -> None:
    trace = excerpt(SYNTHETIC)
    found = simulate(trace, policy=policy, host_blocks=300, nvme_blocks=1200, admission=admission)
    assert 0 < found.hit_blocks <= belady(trace, 1500).hit_blocks


@each_excerpt
@each_policy
def test_a_tier_that_is_never_full_is_as_good_as_an_infinite_one(path: Path, policy: str) -> None:
    trace = excerpt(path)
    found, bound = simulate(trace, policy=policy, host_blocks=trace.num_unique), infinite(trace)
    assert (found.hit_blocks, found.hit_tokens) == (bound.hit_blocks, bound.hit_tokens)


@each_excerpt
def test_gittins_is_hardly_anywhere_below_lru(path: Path) -> None:
    for num_blocks in SIZES:
        lru, ours = (on_host(path, policy, num_blocks) for policy in ("lru", "gittins"))
        assert ours.hit_ratio >= lru.hit_ratio - 0.003, num_blocks


# -- two tiers ----------------------------------------------------------------------------------


@each_policy
def test_an_outcome_is_the_sum_of_its_requests(policy: str) -> None:
    trace = random_trace(5)
    found = simulate(trace, policy=policy, host_blocks=48, nvme_blocks=90, admission="all")
    replay = Replay(trace, policy, 48, nvme_blocks=90)
    finish(replay)
    hits = replay.host_hits + replay.disk_hits
    assert found.host_hit_blocks == replay.host_hits.sum()
    assert found.nvme_hit_blocks == replay.disk_hits.sum()
    assert found.hit_blocks == hits.sum()
    assert found.hit_tokens == trace.hit_tokens(hits)
    assert found.nvme_written_blocks == replay.num_written
    assert found.refs == trace.num_refs
    assert (found.policy, found.admission) == (policy, "all")
    assert (found.host_blocks, found.nvme_blocks) == (48, 90)


@each_excerpt
@each_policy
def test_a_disk_that_takes_nothing_is_none(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing(Everything):
        def admits(self, slots: Array, names: Array, *, now: float) -> Array:
            return np.zeros(len(slots), dtype=bool)

    monkeypatch.setitem(policies.ADMISSIONS, "nothing", Nothing)
    useless = simulate(
        excerpt(path), policy=policy, host_blocks=1000, nvme_blocks=900, admission="nothing"
    )
    assert (useless.nvme_written_blocks, useless.nvme_hit_blocks) == (0, 0)
    assert useless.hit_blocks == on_host(path, policy, 1000).hit_blocks


def test_a_disk_that_is_never_full_has_each_block_written_once() -> None:
    trace = random_trace(1)
    found = simulate(
        trace, policy="lru", host_blocks=48, nvme_blocks=trace.num_unique, admission="all"
    )
    assert found.hit_blocks == infinite(trace).hit_blocks
    assert trace.num_unique - 48 <= found.nvme_written_blocks <= trace.num_unique


# -- the run ------------------------------------------------------------------------------------


@each_policy
@each_admission
def test_it_finds_the_same_each_time(policy: str, admission: str) -> None:
    trace = random_trace(2)
    once, again = (
        simulate(trace, policy=policy, host_blocks=40, nvme_blocks=80, admission=admission)
        for _ in range(2)
    )
    assert timeless(once) == timeless(again)


def test_time_is_measured() -> None:
    assert simulate(excerpt(SYNTHETIC), policy="lru", host_blocks=300).seconds > 0


@each_policy
def test_a_trace_without_a_request_is_replayed(policy: str) -> None:
    trace = TraceBuilder(name="made", block_tokens=4).build()
    found = simulate(trace, policy=policy, host_blocks=20, nvme_blocks=20, admission="all")
    assert (found.hit_blocks, found.refs) == (0, 0)


@each_policy
def test_requests_without_a_block_are_passed_over(policy: str) -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    for at in range(4):
        builder.add(time_s=at, num_tokens=3, ids=[])
        builder.add(time_s=at, num_tokens=8, ids=[1, 2])
    found = simulate(
        builder.build(), policy=policy, host_blocks=20, nvme_blocks=20, admission="all"
    )
    assert (found.hit_blocks, found.refs) == (6, 8)


@each_policy
def test_prompts_longer_than_a_tier_are_kept_from_their_head_on(policy: str) -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    for at in range(6):
        builder.add(time_s=at, num_tokens=400, ids=range(100))
        builder.add(time_s=at + 0.5, num_tokens=400, ids=range(1000, 1100))
    found = simulate(
        builder.build(), policy=policy, host_blocks=30, nvme_blocks=50, admission="all"
    )
    assert found.nvme_written_blocks > 0
    assert 0 < found.hit_blocks <= 10 * 80


def announce_all(replay: Replay, announced: Announced) -> None:
    for request in replay.run():
        announced.before(request)
    announced.at_end()


def made(*sizes: int) -> tuple[Trace, Replay, Announced]:
    trace = excerpt(CONVERSATION)
    replay = Replay(trace, "lru", *sizes)
    return trace, replay, Announced(replay, trace)


def test_the_index_has_at_the_end_what_the_tiers_have() -> None:
    _, replay, announced = made(1000, 500)
    announce_all(replay, announced)
    here = np.stack([replay.host.slots, replay.disk.slots]) != NOWHERE
    assert (announced._known == here).all()
    assert here.sum(axis=1).tolist() == [1000, 500]


def test_a_tier_that_disagrees_with_the_index_is_found_out() -> None:
    _, replay, announced = made(1000)
    announced._index.add("0", announced._keys[:1].tobytes(), [0])
    with pytest.raises(AssertionError):
        announce_all(replay, announced)
