"""One tier that follows for many requests at a time: its tables, its policy and the index."""

import random

import numpy as np
import pytest

from kvray.replay import Trace, one_tier
from kvray.replay.announced import Announced
from kvray.replay.forest import NOWHERE, Forest
from kvray.replay.one_tier import OneTier
from kvray.replay.simulator import POLICIES, keys_of
from kvray.replay.tier import Tier
from kvray.replay.trace import TraceBuilder
from kvray.store import policy as policies
from kvray.store.layout import READY
from kvray.store.policy import LRU, Use
from tests.unit.replay.excerpts import CONVERSATION, excerpt
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


class Checked:
    """A replay whose tier is compared with what it says is there, whenever it has settled."""

    def __init__(self, trace: Trace, policy: str, num_blocks: int) -> None:
        self.trace = trace
        self.replay = OneTier(trace, policy, num_blocks, keys_of(trace.num_unique))
        self.parents = trace.parents()
        self.depths = trace.depths()

    def check(self) -> None:
        forest, tables = self.replay._forest, self.replay._tier.tables
        check_invariants(tables)
        here = np.flatnonzero(self.replay._is_here)
        slots = forest.slots[here]
        assert sorted(slots.tolist()) == np.flatnonzero(tables.slot_state == READY).tolist()
        assert (tables.slot_key[slots] == self.replay._keys[here]).all()
        assert (tables.slot_depth[slots] == self.depths[here]).all()
        above = self.parents[here]
        expected = np.where(above >= 0, forest.slots[above], NOWHERE)
        assert (tables.slot_parent[slots] == expected).all()
        assert (expected[above >= 0] >= 0).all(), "what is there are prefixes"
        assert self.replay._num_free == tables.geometry.num_slots - len(here)


@each_policy
def test_its_tables_have_what_it_says_is_there(policy: str) -> None:
    checked = Checked(tree_trace(1), policy, 40)
    for request in checked.replay.run():
        if request % 7 == 0:
            checked.replay.settle()
            checked.check()
    checked.check()


@each_policy
def test_it_finds_the_same_whenever_the_tier_follows(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tree_trace(2)
    found = []
    for batch in (one_tier.BATCH_REFS, 1):
        monkeypatch.setattr(one_tier, "BATCH_REFS", batch)
        replay = OneTier(trace, policy, trace.num_unique, keys_of(trace.num_unique))
        for _ in replay.run():
            pass
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
    replay = OneTier(trace, "listening", 40, keys_of(trace.num_unique))
    for _ in replay.run():
        pass
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
    replay = OneTier(trace, "lru", 30, keys_of(trace.num_unique))
    for _ in replay.run():
        pass
    assert replay.host_hits.tolist() == [0, 30, 30, 30]


def test_the_index_has_at_the_end_what_the_tier_has() -> None:
    trace = excerpt(CONVERSATION)
    keys = keys_of(trace.num_unique)
    replay = OneTier(trace, "lru", 1000, keys)
    for _ in replay.run():
        pass
    assert (replay._announced.locate(keys) == replay._is_here).all()
    assert len(replay._announced) == np.count_nonzero(replay._is_here) == 1000


def test_a_tier_that_lost_a_block_unnoticed_is_found_out() -> None:
    trace = tree_trace(4)
    replay = OneTier(trace, "lru", trace.num_unique, keys_of(trace.num_unique))

    def lose_one() -> None:
        for request in replay.run():
            if request == 200:
                replay.settle()
                leaf = np.flatnonzero(replay._tier.tables.slot_state == READY)[-1:]
                replay._tier.evict(leaf)

    with pytest.raises(AssertionError):
        lose_one()


def test_only_what_stays_is_announced() -> None:
    trace = tree_trace(5)
    keys = keys_of(trace.num_unique)
    tier = Tier(50, LRU(50))
    forest, announced = Forest(trace, tier, keys), Announced(tier.tables)
    path = trace.ids[trace.starts[0] : trace.starts[1]]
    forest.store(path)
    announced.announce()
    assert announced.locate(keys[path]).all()
    forest.evict(path[-1:])
    forest.store(path[-1:])
    forest.evict(path[-1:])
    announced.announce()
    assert announced.locate(keys[path]).tolist() == [True] * (len(path) - 1) + [False]
    assert len(announced) == len(path) - 1
