"""The simulator beside LRU in plain Python, the bounds, and what its own tables say."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvray.replay import Outcome, Trace, belady, infinite
from kvray.replay.one_tier import OneTier
from kvray.replay.simulator import ADMISSIONS, POLICIES, keys_of, simulate
from kvray.replay.tier import Tier
from kvray.replay.trace import TraceBuilder
from kvray.replay.two_tiers import TwoTiers
from kvray.store import policy as policies
from kvray.store.layout import READY
from kvray.store.policy import Everything
from kvray.store.tables import Array
from tests.unit.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt
from tests.unit.replay.lru import lru_hits
from tests.unit.store.invariants import check_invariants

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
        builder.add(
            time_s=now,
            num_tokens=4 * len(path) - rng.randrange(4),
            ids=path,
            num_answer_tokens=rng.choice((0, 50, 400)),
        )
    return builder.build()


@cache
def on_host(path: Path, policy: str, num_blocks: int) -> Outcome:
    """Return what one tier finds of an excerpt; several tests look at it."""
    return simulate(excerpt(path), policy=policy, host_blocks=num_blocks)


def timeless(outcome: Outcome) -> Outcome:
    return replace(outcome, seconds=0.0)


# -- beside LRU, Belady and the infinite cache --------------------------------------------------


def one_tier(trace: Trace, policy: str, num_blocks: int) -> OneTier:
    return OneTier(trace, policy, num_blocks, keys_of(trace.num_unique))


def two_tiers(trace: Trace, policy: str, sizes: tuple[int, int], admission: str) -> TwoTiers:
    return TwoTiers(trace, policy, sizes, admission, keys_of(trace.num_unique))


def finish(replay: OneTier | TwoTiers) -> None:
    for _ in replay.run():
        pass


@each_excerpt
def test_one_tier_of_lru_finds_what_lru_finds_of_every_request(path: Path) -> None:
    trace = excerpt(path)
    for num_blocks in SIZES:
        replay = one_tier(trace, "lru", num_blocks)
        finish(replay)
        assert replay.host_hits.tolist() == lru_hits(trace, num_blocks)


@each_excerpt
def test_above_a_disk_lru_is_between_lru_of_its_size_and_of_a_step_less(path: Path) -> None:
    trace = excerpt(path)
    for num_blocks in SIZES:
        replay = two_tiers(trace, "lru", (num_blocks, 500), "all")
        finish(replay)
        # When room is made, it is made for 1 % of the blocks, or 16: so many fewer may be there
        # than in a cache that is always full. What is there are the youngest, whichever they are.
        step = max(16, num_blocks // 100)
        most = np.array(lru_hits(trace, num_blocks))
        least = np.array(lru_hits(trace, num_blocks - step))
        assert (least <= replay.host_hits).all()
        assert (replay.host_hits <= most).all()


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


class Watched:
    """A replay of which every request is compared with what its tables say."""

    def __init__(self, trace: Trace, policy: str, admission: str) -> None:
        self.trace = trace
        self.replay = two_tiers(trace, policy, (48, 60), admission)
        self.host, self.disk = self.replay._host, self.replay.disk
        self._ids = {key.tobytes(): at for at, key in enumerate(self.replay._keys)}
        self._parents = trace.parents().tolist()

    def blocks(self, tier: Tier) -> dict[int, int]:
        """Return the blocks of a tier, and their slots."""
        slots = np.flatnonzero(tier.tables.slot_state == READY)
        return {self._ids[tier.tables.slot_key[slot].tobytes()]: int(slot) for slot in slots}

    def make(self, request: int) -> None:
        start, end = self.trace.starts[request : request + 2]
        path = self.trace.ids[start:end].tolist()
        host, disk = self.blocks(self.host), self.blocks(self.disk.tier)
        in_host = run(path, host)
        self.replay.make(request)
        assert self.replay.host_hits[request] == in_host
        assert self.replay.disk_hits[request] == run(path[in_host:], disk)
        self.check_prefixes()
        self.check_copies()
        assert set(path[:in_host]) <= set(self.blocks(self.host)), "what was found stays"

    def check_prefixes(self) -> None:
        for tier in (self.host, self.disk.tier):
            check_invariants(tier.tables)
            found = self.blocks(tier)
            for block, slot in found.items():
                parent = self._parents[block]
                assert int(tier.tables.slot_parent[slot]) == found.get(parent, -1)
                assert parent < 0 or parent in found

    def check_copies(self) -> None:
        below, above = self.disk._below, self.disk._above
        if isinstance(self.host.policy, policies.LRU):
            used, last = np.flatnonzero(below >= 0), self.host.policy._last
            assert (self.disk.tier.policy._last[below[used]] == last[used]).all()
        for tier in (self.host, self.disk.tier):
            if isinstance(tier.policy, policies.S3FIFO):
                slots, key = np.flatnonzero(tier.tables.slot_state == READY), tier.tables.slot_key
                assert (tier.policy._place[slots] > 0).all(), "each is in a queue"
                assert (tier.policy._name[slots] == key[slots, 0].view(np.int64)).all()
        for one, other, tier, other_tier in (
            (below, above, self.host, self.disk.tier),
            (above, below, self.disk.tier, self.host),
        ):
            here = np.flatnonzero(one >= 0)
            assert (other[one[here]] == here).all()
            assert (tier.tables.slot_state[here] == READY).all()
            assert (tier.tables.slot_key[here] == other_tier.tables.slot_key[one[here]]).all()


def run(path: list[int], there: dict[int, int]) -> int:
    """Return how many leading blocks of a path are there."""
    return next((at for at, block in enumerate(path) if block not in there), len(path))


@each_policy
@each_admission
def test_both_tiers_hold_prefixes_and_know_each_others_blocks(policy: str, admission: str) -> None:
    watched = Watched(random_trace(3), policy, admission)
    for request in range(watched.trace.num_requests):
        watched.make(request)
    disk = watched.disk
    assert disk.num_written == disk.tier.tables.stored
    num_blocks = len(watched.blocks(disk.tier))
    assert disk.num_written - disk.tier.tables.evicted == num_blocks
    assert disk.num_written > 90, "it was full once"
    assert watched.replay.disk_hits.any()


@each_policy
def test_an_outcome_is_the_sum_of_its_requests(policy: str) -> None:
    trace = random_trace(5)
    found = simulate(trace, policy=policy, host_blocks=48, nvme_blocks=90, admission="all")
    replay = two_tiers(trace, policy, (48, 90), "all")
    finish(replay)
    hits = replay.host_hits + replay.disk_hits
    assert found.host_hit_blocks == replay.host_hits.sum()
    assert found.nvme_hit_blocks == replay.disk_hits.sum()
    assert found.hit_blocks == hits.sum()
    assert found.hit_tokens == trace.hit_tokens(hits)
    assert found.nvme_written_blocks == replay.num_written
    assert (found.refs, found.requests) == (trace.num_refs, trace.num_requests)
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
    # It ranks blocks more often, and makes room for 16 at a time.
    assert useless.hit_ratio == pytest.approx(on_host(path, policy, 1000).hit_ratio, abs=0.015)


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


def test_progress_ends_with_the_last_request() -> None:
    seen: list[tuple[int, int]] = []
    trace = excerpt(CONVERSATION)
    simulate(trace, policy="lru", host_blocks=100, progress=lambda *done: seen.append(done))
    assert seen == [(0, 400), (256, 400), (400, 400)]


def test_time_is_measured() -> None:
    assert simulate(excerpt(SYNTHETIC), policy="lru", host_blocks=300).seconds > 0


@each_policy
def test_a_trace_without_a_request_is_replayed(policy: str) -> None:
    trace = TraceBuilder(name="made", block_tokens=4).build()
    found = simulate(trace, policy=policy, host_blocks=20, nvme_blocks=20, admission="all")
    assert (found.hit_blocks, found.refs, found.requests) == (0, 0, 0)


@each_policy
def test_requests_without_a_block_are_passed_over(policy: str) -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    for at in range(4):
        builder.add(time_s=at, num_tokens=3, ids=[])
        builder.add(time_s=at, num_tokens=8, ids=[1, 2], num_answer_tokens=10)
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


def test_an_answer_is_known_when_it_has_been_given(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    class Listening(policies.LRU):
        def answered(self, request: int, num_tokens: int) -> None:
            told.append((request, num_tokens))

    monkeypatch.setitem(policies.POLICIES, "listening", Listening)
    builder = TraceBuilder(name="made", block_tokens=4)
    for time_s, answer in ((0.0, 500), (1.0, 50), (3.0, 0), (9.9, 50), (12.0, 50)):
        builder.add(time_s=time_s, num_tokens=4, ids=[1], num_answer_tokens=answer)
    replay = two_tiers(builder.build(), "listening", (20, 20), "all")
    known = []
    for request in range(5):
        replay.make(request)
        known.append(list(told))
    # 50 tokens a second: the first one's is known after 10 s, the second one's after 1 s.
    assert known == [[], [], [(1, 50)], [(1, 50)], [(1, 50), (0, 500), (3, 50)]]
