"""The drain of a node without Ray: what only `b` has goes to `a`, and which blocks go first."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.shard.giving import drain
from kvray.actors.shard.giving.choice import (
    batches,
    chains_of,
    held_by,
    hottest_first,
    shared_out,
    span_of,
)
from kvray.identity.block import BlockKey, split_keys
from kvray.index import Run
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.tables import Array, Tables
from tests.unit.actors.test_shard_staging import Tier, known, tier
from tests.unit.store.small_arena import chain, fetch, make_tables, put, store, take
from tests.waiting import wait_for

__all__ = ["tier"]

B = "kvray-shard-b"


@pytest.fixture
def draining(tier: Tier) -> Tier:
    """The tier, whose nodes may be drained."""
    tier.nodes.others["kvray-shard-a.room"] = tier.a.requests.room
    return tier


def progress(tier: Tier) -> dict[str, Any]:
    found: dict[str, Any] = tier.b.status().get("drain") or {}
    return found


def has(tier: Tier, node: str, keys: list[BlockKey]) -> bool:
    return bool(tier.nodes[node].arena.match(keys) == len(keys))


def test_what_only_a_node_that_is_to_go_has_goes_to_another(draining):
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    wait_for(lambda: known(draining, keys))

    draining.b.requests.drain("somebody", None)

    wait_for(lambda: has(draining, "a", keys))
    leases = draining.nodes["a"].arena.lease(keys)
    assert leases
    assert fetch(draining.nodes["a"].arena, keys, leases[0])
    wait_for(lambda: progress(draining)["state"] == "moved")
    assert progress(draining) == {
        "by": ["somebody"],
        "seconds_left": None,
        "state": "moved",
        "moved_blocks": 12,
        "moved_bytes": 12 * 4096,
        "left_bytes": 0,
    }


def test_what_is_saved_meanwhile_goes_too(draining):
    draining.b.requests.drain("somebody", None)
    keys = chain(5, seed="later")
    store(draining.nodes["b"].arena, keys)
    wait_for(lambda: has(draining, "a", keys))


def test_what_another_node_has_too_is_not_sent(draining):
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    store(draining.nodes["a"].arena, keys[:7])
    locate = draining.nodes.others["kvray-lookup.locate"]
    wait_for(lambda: len(locate(b"".join(keys))) == 2 and locate(b"".join(keys))[-1].stop == 12)

    draining.b.requests.drain("somebody", None)

    wait_for(lambda: progress(draining)["state"] == "moved")
    assert has(draining, "a", keys)
    assert progress(draining)["moved_blocks"] == 5


def test_what_is_on_disk_only_goes_too(draining):
    keys = chain(40)
    store(draining.nodes["b"].arena, keys)
    wait_for(lambda: draining.b.status()["nvme"]["demoted_blocks"] == 40)
    assert ArenaOwner(draining.nodes["b"].arena).clear() == 40
    time.sleep(0.1)

    draining.b.requests.drain("somebody", None)

    wait_for(lambda: has(draining, "a", keys))


def test_without_time_nothing_moves_and_the_status_says_so(draining):
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    draining.b.requests.drain("somebody", 0.0)
    wait_for(lambda: progress(draining).get("state") == "late")
    time.sleep(1.5)  # it looks again meanwhile
    assert progress(draining)["state"] == "late"
    assert not draining.nodes["a"].arena.match(keys)


def test_a_drain_that_is_called_off_leaves_the_node_as_it_was(draining):
    draining.b.requests.drain("somebody", None)
    draining.b.requests.drain("another", 60.0)
    draining.b.requests.call_off_drain("somebody")
    assert progress(draining)["by"] == ["another"]
    draining.b.requests.call_off_drain("another")
    draining.b.requests.call_off_drain("nobody")
    assert not progress(draining)
    time.sleep(0.2)
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    time.sleep(1.5)
    assert not draining.nodes["a"].arena.match(keys)
    draining.b.requests.drain("somebody", None)
    wait_for(lambda: has(draining, "a", keys))


def test_whoever_asks_about_blocks_hears_that_the_node_is_to_go(draining):
    def is_leaving() -> bool:
        return bool(draining.b.queries.whereabouts(None, b"".join(chain(1))).is_leaving)

    assert not is_leaving()
    draining.b.requests.drain("somebody", None)
    wait_for(is_leaving)
    draining.b.requests.call_off_drain("somebody")
    wait_for(lambda: not is_leaving())


def test_an_order_right_after_a_call_off_counts(draining):
    for _ in range(20):
        draining.b.requests.drain("somebody", None)
        draining.b.requests.call_off_drain("somebody")
    draining.b.requests.drain("somebody", None)
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    wait_for(lambda: has(draining, "a", keys))


def test_without_another_node_it_waits_and_says_so(tier):
    tier.nodes.others["kvray-lookup.targets"] = lambda: [B]
    tier.b.requests.drain("somebody", None)
    wait_for(lambda: "No other node" in progress(tier).get("message", ""))


def test_a_lookup_that_is_gone_for_a_while_ends_nothing(draining):
    keys = chain(12)
    store(draining.nodes["b"].arena, keys)
    draining.nodes.gone.add("kvray-lookup")
    draining.b.requests.drain("somebody", None)
    wait_for(lambda: progress(draining).get("message"))
    draining.nodes.gone.clear()
    wait_for(lambda: has(draining, "a", keys))


def test_a_node_that_takes_nothing_is_named(draining):
    store(draining.nodes["b"].arena, chain(12))
    draining.nodes.gone.add("kvray-mover-a")
    draining.b.requests.drain("somebody", None)
    wait_for(lambda: "kvray-mover-a" in progress(draining).get("message", ""))
    assert progress(draining)["state"] == "moving"


def test_what_is_used_here_meanwhile_stays_hot_where_it_went(draining):
    arenas = {name: draining.nodes[name].arena for name in "ab"}
    hot, cold = chain(6, seed="hot"), chain(6, seed="cold")
    store(arenas["b"], hot)
    store(arenas["b"], cold)
    draining.b.requests.drain("somebody", None)
    wait_for(lambda: has(draining, "a", hot) and has(draining, "a", cold))

    def ticks(name: str, keys: list[BlockKey]) -> list[int]:
        tables = arenas[name].tables
        slots = key_index.find(tables, key_index.pack_keys(keys), 0)
        return [int(tick) for tick in tables.slot_tick[slots]]

    before, at_source = ticks("a", hot + cold), ticks("b", cold)
    for lease in arenas["b"].lease(hot) or ():
        arenas["b"].release(lease)
    wait_for(lambda: min(ticks("a", hot)) > max(before))
    assert ticks("a", cold) == before[len(hot) :]
    assert ticks("b", cold) == at_source, "what is given away is not used by that"


def test_what_others_have_already_leaves_room_for_colder_blocks_at_once(draining, monkeypatch):
    cold, hot = (chain(24, seed=name) for name in ("cold", "hot"))
    pauses: list[bool] = []

    async def pause(woken: asyncio.Event, seconds: float) -> None:
        """Note whether there was a reason to pause: it is done, or a shard did not answer."""
        pauses.append(has(draining, "a", cold) or "message" in progress(draining))
        await pause_of_drain(woken, 0.1)

    pause_of_drain = drain.pause
    monkeypatch.setattr(drain, "pause", pause)
    store(draining.nodes["b"].arena, cold)
    time.sleep(0.1)
    store(draining.nodes["b"].arena, hot)
    store(draining.nodes["a"].arena, hot)
    locate = draining.nodes.others["kvray-lookup.locate"]
    whole = [(24, {"kvray-shard-a", B})]
    wait_for(lambda: [(run.stop, set(run.holders)) for run in locate(b"".join(hot))] == whole)
    draining.nodes.others["kvray-shard-a.room"] = lambda: 0  # it takes half of b's 48

    draining.b.requests.drain("somebody", None)

    wait_for(lambda: has(draining, "a", cold))
    wait_for(lambda: progress(draining)["moved_blocks"] == 24)
    assert all(pauses)


TREES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=12)


def tree(sizes: list[tuple[int, int]]) -> Tables:
    """Return tables with chains, each of them on top of a block that is there already."""
    tables = make_tables(num_slabs=8, slots_per_slab=8)
    known = [(None, 0)]
    for seed, (at, length) in enumerate(sizes):
        parent, depth = known[at % len(known)]
        keys = chain(length, seed=str(seed), head=parent)
        put(tables, keys, parent=parent, depth=depth)
        known += [(key, depth + nth + 1) for nth, key in enumerate(keys)]
    return tables


def rank_of(tables: Tables, seed: int) -> "Array":
    return np.random.default_rng(seed).permutation(tables.geometry.num_slots).astype(float)


@given(TREES, st.integers(0, 9))
def test_the_order_is_that_of_eviction_from_its_end(sizes, seed):
    tables = tree(sizes)
    ranks = rank_of(tables, seed)
    everything = np.arange(tables.geometry.num_slots)

    hottest = hottest_first(tables, lambda slots: ranks[slots])

    going = choose_victims(tables, 99, within=everything, rank=lambda slots: ranks[slots])
    assert hottest.tolist() == going[::-1].tolist()


def test_a_block_that_is_read_goes_like_any_other():
    tables = make_tables()
    keys = chain(3)
    put(tables, keys)
    take(tables, keys)
    assert len(hottest_first(tables, lambda slots: slots)) == 3


@given(TREES, st.integers(0, 9))
def test_spans_have_every_block_once_and_parents_first(sizes, seed):
    tables = tree(sizes)
    ranks = rank_of(tables, seed)
    slots = hottest_first(tables, lambda slots: ranks[slots])

    spans = [span_of(tables, chain, "mover") for chain in chains_of(tables, slots)]

    keys = [key for span in spans for key in split_keys(span.keys)]
    assert sorted(keys) == sorted(tables.slot_key[slot].tobytes() for slot in slots)
    slot_of = {tables.slot_key[slot].tobytes(): slot for slot in slots.tolist()}
    seen: set[bytes] = set()
    for span in spans:
        before = span.parent
        for nth, key in enumerate(split_keys(span.keys)):
            slot = slot_of[key]
            parent = int(tables.slot_parent[slot])
            assert before == (tables.slot_key[parent].tobytes() if parent >= 0 else b"")
            assert not before or before in seen, "a child comes before its parent"
            assert tables.slot_depth[slot] == span.depth + nth
            seen.add(key)
            before = key


@given(TREES, st.integers(1, 5))
def test_a_chain_goes_to_one_node_and_each_block_to_some(sizes, num_targets):
    tables = tree(sizes)
    slots = hottest_first(tables, lambda slots: slots)
    shares = shared_out(tables, slots, num_targets)
    assert sorted(np.concatenate(shares).tolist()) == sorted(slots.tolist())
    heads = [set(tables.slot_head[share].tolist()) for share in shares]
    assert sum(map(len, heads)) == len(set().union(*heads))


@given(TREES, st.integers(1, 60_000), st.integers(1, 9))
def test_batches_keep_within_their_bounds(sizes, bytes_max, blocks_max):
    tables = tree(sizes)
    slots = hottest_first(tables, lambda slots: slots)
    found = list(batches(tables, slots, bytes_max=bytes_max, blocks_max=blocks_max))
    assert np.concatenate(found).tolist() == slots.tolist()
    for batch in found:
        assert 1 <= len(batch) <= blocks_max
        assert len(batch) == 1 or tables.block_bytes(batch).sum() <= bytes_max


def test_a_part_counts_as_held_where_another_node_has_just_that():
    runs = [
        Run(stop=1, holders={"own": 0b11}),
        Run(stop=2, holders={"own": 0b11, "other": 0b01}),
        Run(stop=3, holders={}),
        Run(stop=5, holders={"leaving": 0b11, "other": 0b10}),
    ]
    parts = np.array([0, 0, 0, 1, 0, 1])
    held = held_by(runs, parts, frozenset({"other", "third"}))
    assert sum(held.values()).tolist() == [False, True, False, True, False, False]
