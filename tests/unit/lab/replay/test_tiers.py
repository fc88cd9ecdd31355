"""Tiers that follow for many requests at a time: their tables, their policies and the index."""

import random

import numpy as np
import pytest

from kvray.lab.replay import Trace, tiers
from kvray.lab.replay.announced import Announced
from kvray.lab.replay.level import NOWHERE, Level
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES
from kvray.lab.replay.tiers import Tiers, keys_of
from kvray.lab.replay.trace import TraceBuilder
from kvray.store import policy as policies
from kvray.store.arena.layout import READY
from kvray.store.policy import LRU, Use
from tests.unit.lab.replay.excerpts import CONVERSATION, excerpt
from tests.unit.store.invariants import check_invariants

each_policy = pytest.mark.parametrize("policy", POLICIES)


def tree_trace(seed: int, *, num_requests: int = 300) -> Trace:
    """Return requests for paths of a tree, of which many end or fork halfway."""
    rng = random.Random(seed)
    builder = TraceBuilder(name="random", block_tokens=4)
    paths: list[list[int]] = [[0]]
    for at in range(num_requests):
        before = rng.choice(paths[-20:])
        path = before[: rng.randrange(1, len(before) + 1)]
        while len(path) < 12 and rng.random() < 0.8:
            path = [*path, path[-1] * 4 + rng.randrange(1, 5)]
        paths.append(path)
        builder.add(time_s=float(at), num_tokens=4 * len(path), ids=path, num_answer_tokens=60)
    return builder.build()


def tiers_of(trace: Trace, policy: str, num_blocks: int) -> Tiers:
    return Tiers(trace, policy, num_blocks)


def finish(replay: Tiers) -> None:
    for _ in replay.run():
        pass


class Checked:
    """A replay whose tables are compared with what it says is there, whenever it has settled."""

    def __init__(self, trace: Trace, policy: str, *, nvme_blocks: int, admission: str) -> None:
        self.trace = trace
        self.replay = Tiers(trace, policy, 40, nvme_blocks=nvme_blocks, admission=admission)
        self.keys = self.replay.keys
        self.levels = [self.replay.host]
        if self.replay.disk is not None:
            self.levels.append(self.replay.disk.level)
        self.parents = trace.parents()
        self.depths = trace.depths()

    def run(self, *, every: int) -> None:
        """Make all requests; before one in `every`, compare, and foretell what it finds."""
        for request in self.replay.run():
            if request:
                self.compare(request - 1)
            self.expected: list[int] = []
            if request % every == 0:
                self.replay.settle()
                self.check()
                self.expected = self.foretell(request)
        self.compare(request)
        self.check()

    def foretell(self, request: int) -> list[int]:
        """Return how many blocks of a request each level has, by its tables."""
        ids = self.trace.ids[self.trace.starts[request] : self.trace.starts[request + 1]]
        found = []
        for level in self.levels:
            tables = level.tier.tables
            there = {key.tobytes() for key in tables.slot_key[tables.slot_state == READY]}
            leading = 0
            while leading < len(ids) and self.keys[ids[leading]].tobytes() in there:
                leading += 1
            found.append(leading)
            ids = ids[leading:]
        return found

    def compare(self, request: int) -> None:
        hits = self.replay.host_hits[request], self.replay.disk_hits[request]
        assert not self.expected or self.expected == list(hits[: len(self.levels)])

    def check(self) -> None:
        for level in self.levels:
            self.check_level(level)
        if self.replay.disk is not None:
            self.check_copies(*self.levels)
            tables = self.levels[1].tier.tables
            assert self.replay.disk.num_written == tables.stored
            here = np.count_nonzero(self.levels[1].is_here)
            assert self.replay.disk.num_written - tables.evicted == here

    def check_level(self, level: Level) -> None:
        tables = level.tier.tables
        check_invariants(tables)
        here = np.flatnonzero(level.is_here)
        slots = level.slots[here]
        assert sorted(slots.tolist()) == np.flatnonzero(tables.slot_state == READY).tolist()
        assert (tables.slot_key[slots] == self.keys[here]).all()
        assert (tables.slot_depth[slots] == self.depths[here]).all()
        above = self.parents[here]
        expected = np.where(above >= 0, level.slots[above], NOWHERE)
        assert (tables.slot_parent[slots] == expected).all()
        assert (expected[above >= 0] >= 0).all(), "what is there are prefixes"
        assert level.num_free == tables.geometry.num_slots - len(here)
        policy = level.tier.policy
        if isinstance(policy, policies.S3FIFO):
            assert (policy._place[slots] > 0).all(), "each is in a queue"
            assert (policy._name[slots] == self.keys[here][:, 0].view(np.int64)).all()

    def check_copies(self, host: Level, disk: Level) -> None:
        both = np.flatnonzero(host.is_here & disk.is_here)
        above, below = host.tier.policy, disk.tier.policy
        if isinstance(above, LRU) and isinstance(below, LRU):
            assert (below._last[disk.slots[both]] == above._last[host.slots[both]]).all()


@each_policy
@pytest.mark.parametrize("every", [1, 7])
def test_its_tables_have_what_it_says_is_there(policy: str, every: int) -> None:
    Checked(tree_trace(1), policy, nvme_blocks=0, admission="all").run(every=every)


@each_policy
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("every", [1, 7])
def test_with_a_disk_both_tables_have_what_it_says_is_there(
    policy: str, admission: str, every: int
) -> None:
    checked = Checked(tree_trace(1), policy, nvme_blocks=60, admission=admission)
    checked.run(every=every)
    assert checked.replay.disk is not None
    assert checked.replay.disk.num_written > 90, "it was full once"
    assert checked.replay.disk_hits.any()


@each_policy
def test_it_finds_the_same_whenever_the_tier_follows(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tree_trace(2)
    found = []
    for batch in (tiers.BATCH_REFS, 1):
        monkeypatch.setattr(tiers, "BATCH_REFS", batch)
        replay = tiers_of(trace, policy, trace.num_unique)
        finish(replay)
        found.append(replay.host_hits.tolist())
    assert found[0] == found[1]


def test_the_policy_is_told_of_every_request_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int | None, int, int]] = []

    class Listening(LRU):
        def used(self, use: Use) -> None:
            told.append((use.request, use.depth, len(use.slots)))
            super().used(use)

        def stored(self, use: Use) -> None:
            self.used(use)

    monkeypatch.setitem(policies.POLICIES, "listening", Listening)
    trace = tree_trace(3)
    replay = tiers_of(trace, "listening", 40)
    finish(replay)
    lengths = np.diff(trace.starts)
    expected = []
    for request, hits in enumerate(replay.host_hits.tolist()):
        expected += [(request, 0, hits)] if hits else []
        missing = int(lengths[request]) - hits
        expected += [(request, hits, missing)] if missing else []
    assert told == expected


def test_a_prompt_longer_than_the_tier_keeps_its_head() -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    for at in range(4):
        builder.add(time_s=at, num_tokens=400, ids=range(100))
    trace = builder.build()
    replay = tiers_of(trace, "lru", 30)
    finish(replay)
    assert replay.host_hits.tolist() == [0, 30, 30, 30]


def test_the_index_has_at_the_end_what_the_tiers_have() -> None:
    trace = excerpt(CONVERSATION)
    replay = Tiers(trace, "lru", 1000, nvme_blocks=500)
    finish(replay)
    assert replay.disk is not None
    here = np.stack([replay.host.is_here, replay.disk.level.is_here])
    assert (replay._announced.locate(replay.keys) == here).all()
    assert here.sum(axis=1).tolist() == [1000, 500]
    assert len(replay._announced) == np.count_nonzero(here.any(axis=0))


def test_a_tier_that_lost_a_block_unnoticed_is_found_out() -> None:
    trace = tree_trace(4)
    replay = tiers_of(trace, "lru", trace.num_unique)

    def lose_one() -> None:
        for request in replay.run():
            if request == 200:
                replay.settle()
                tier = replay.host.tier
                tier.evict(np.flatnonzero(tier.tables.slot_state == READY)[-1:])

    with pytest.raises(AssertionError):
        lose_one()


def test_only_what_stays_is_announced() -> None:
    trace = tree_trace(5)
    keys = keys_of(trace.num_unique)
    level = Level(trace, LRU(50), 50, keys, settle=lambda now: None)
    announced = Announced([level.tier.tables])
    path = trace.ids[trace.starts[0] : trace.starts[1]]
    level.store(path)
    announced.announce()
    assert announced.locate(keys[path])[0].all()
    level.evict(path[-1:])
    level.store(path[-1:])
    level.evict(path[-1:])
    announced.announce()
    assert announced.locate(keys[path])[0].tolist() == [True] * (len(path) - 1) + [False]
    assert len(announced) == len(path) - 1
