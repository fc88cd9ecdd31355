"""The drain of a node without Ray: what only `b` has goes to `a`, and which blocks go first."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.shard.sending import drain
from kvray.actors.shard.sending.sender import (
    batches,
    chains_of,
    held_by,
    hottest_first,
    shared_out,
    span_of,
)
from kvray.cli.status import drain_sentence
from kvray.identity.block import BlockKey, split_keys
from kvray.index import Run
from kvray.store.arena import key_index, slots
from kvray.store.arena.tables import Array, Tables
from tests.examples import examples
from tests.unit.actors.nodes import Tier
from tests.unit.store.small_arena import (
    chain,
    find,
    make_tables,
    num_here,
    put,
    served,
    store,
    take,
    victims,
)
from tests.waiting import wait_for

B = "kvray-shard-b"
KEYS = chain(12)


def progress(tier: Tier) -> dict[str, Any]:
    return dict(tier.b.status().get("drain") or {})


def drain_b(tier: Tier, seconds: float | None = None, by: str = "somebody") -> None:
    tier.b.requests.drain(by, seconds)


def test_what_only_a_node_that_is_to_go_has_goes_to_another(tier):
    store(tier.arena("b"), KEYS)
    store(tier.arena("a"), KEYS[:7])
    wait_for(lambda: tier.locate(KEYS) == [(7, {"kvray-shard-a", B}), (12, {B})])
    drain_b(tier)
    wait_for(lambda: progress(tier)["state"] == "moved")
    assert served(tier.arena("a"), KEYS) == 12
    assert progress(tier) == {
        "by": ["somebody"],
        "seconds_left": None,
        "state": "moved",
        "moved_blocks": 5,
        "moved_bytes": 5 * 4096,
        "left_bytes": 0,
        "behind_bytes": 0,
    }


def test_without_time_nothing_moves_and_with_time_also_what_is_on_disk_only(tier):
    keys = chain(40)
    tier.demote(keys)
    tier.lose_from_memory(keys)
    drain_b(tier, 0.0)
    wait_for(lambda: progress(tier).get("state") == "late")
    time.sleep(1.5)  # it looks again meanwhile
    assert progress(tier)["state"] == "late"
    assert progress(tier)["left_bytes"] == 40 * 4096, "nobody else is known to have them"
    assert not num_here(tier.arena("a"), keys)
    drain_b(tier)
    wait_for(lambda: tier.has("a", keys))


def test_a_drain_that_is_called_off_leaves_the_node_as_it_was(tier):
    def is_leaving() -> bool:
        """Return whether those hear it who ask about blocks."""
        return bool(tier.b.requests.whereabouts(None, KEYS[0]).is_leaving)

    assert not is_leaving()
    drain_b(tier)
    drain_b(tier, 60.0, by="another")
    wait_for(is_leaving)
    tier.b.requests.call_off_drain("somebody")
    assert progress(tier)["by"] == ["another"]
    for who in ("another", "nobody"):
        tier.b.requests.call_off_drain(who)
    assert not progress(tier)
    wait_for(lambda: not is_leaving())
    time.sleep(0.2)
    store(tier.arena("b"), KEYS)
    time.sleep(1.5)
    assert not num_here(tier.arena("a"), KEYS)
    drain_b(tier)
    wait_for(lambda: tier.has("a", KEYS))


def test_an_order_right_after_a_call_off_counts(tier):
    for _ in range(20):
        drain_b(tier)
        tier.b.requests.call_off_drain("somebody")
    drain_b(tier)
    store(tier.arena("b"), KEYS)
    wait_for(lambda: tier.has("a", KEYS))


def test_without_another_node_it_waits_and_says_so(tier):
    tier.nodes.others["kvray-lookup.targets"] = lambda: [B]
    store(tier.arena("b"), KEYS)
    drain_b(tier, 1.0)
    wait_for(lambda: "No other node" in progress(tier).get("message", ""))
    wait_for(lambda: progress(tier)["state"] == "late")
    assert progress(tier)["left_bytes"] == 12 * 4096


@pytest.mark.parametrize("gone", ["kvray-lookup", "kvray-mover-a"])
def test_who_is_gone_for_a_while_is_named_and_ends_nothing(tier, gone):
    store(tier.arena("b"), KEYS)
    tier.nodes.gone.add(gone)
    drain_b(tier)
    wait_for(lambda: gone in progress(tier).get("message", ""))
    assert progress(tier)["state"] == "moving"
    tier.nodes.gone.clear()
    wait_for(lambda: tier.has("a", KEYS))


@pytest.fixture
def heats(tier: Tier) -> tuple[list[BlockKey], list[BlockKey]]:
    """Cold and hot blocks at `b`; `a` takes half of them."""
    cold, hot = (chain(24, seed=name) for name in ("cold", "hot"))
    store(tier.arena("b"), cold)
    time.sleep(0.1)
    store(tier.arena("b"), hot)
    tier.nodes.others["kvray-shard-a.room"] = lambda: 0
    return cold, hot


def test_what_is_used_here_meanwhile_stays_hot_where_it_went(tier):
    arenas = {name: tier.arena(name) for name in "ab"}
    hot, cold = chain(6, seed="hot"), chain(6, seed="cold")
    store(arenas["b"], hot)
    store(arenas["b"], cold)
    drain_b(tier)
    wait_for(lambda: tier.has("a", hot) and tier.has("a", cold))

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


def test_what_others_have_already_leaves_room_for_colder_blocks_at_once(tier, heats, monkeypatch):
    cold, hot = heats
    pauses: list[bool] = []

    async def pause(woken: asyncio.Event, seconds: float) -> None:
        """Note whether there was a reason to pause: it is done, or a shard did not answer."""
        pauses.append(tier.has("a", cold) or "message" in progress(tier))
        await pause_of_drain(woken, 0.1)

    pause_of_drain = drain.pause
    monkeypatch.setattr(drain, "pause", pause)
    store(tier.arena("a"), hot)
    wait_for(lambda: tier.locate(hot) == [(24, {"kvray-shard-a", B})])
    drain_b(tier)
    wait_for(lambda: tier.has("a", cold))
    wait_for(lambda: progress(tier)["moved_blocks"] == 24)
    wait_for(lambda: progress(tier)["state"] == "moved")
    assert progress(tier)["behind_bytes"] == 0, "others have it all"
    assert all(pauses)


def test_a_block_that_took_a_slot_while_others_were_sent_was_not_sent():
    tables, new = make_tables(), chain(1, seed="new")
    filled = put(tables, KEYS[:4]).slots
    cold = filled[-1:]

    class Sender:
        shard = B

        async def held(self, tables: Tables, batch: Array, _targets: frozenset[str]) -> Array:
            return np.isin(batch, cold)

        async def send(self, tables: Tables, batch: Array, *_: Any, **__: Any) -> tuple[Array, str]:
            slots.evict(tables, cold)
            tables.undo.settle()
            put(tables, new)
            return batch, ""

    made = drain.Drain(Sender())
    made._orders, made._budget = {"x": None}, 2**30
    made._figures = dict.fromkeys(drain._FIGURES, 0)
    asyncio.run(made._send(tables, filled, "a", ["a"]))
    here = np.array(find(tables, new))
    assert here.tolist() == cold.tolist()
    assert not made._is_settled(tables, here).any()


def test_what_others_have_no_room_for_is_said_to_stay(tier, heats):
    drain_b(tier)
    wait_for(lambda: progress(tier)["state"] == "moved")
    assert tier.has("a", heats[1])
    assert progress(tier)["behind_bytes"] == 24 * 4096
    sentence = drain_sentence("b", progress(tier))
    assert "and 96KiB that others have no room for stay" in sentence


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tables, Callable[[Array], Array]]:
    """Return tables with chains, each on top of a block that is there already, and their ranks."""
    tables, known = make_tables(num_slabs=8, slots_per_slab=8), [(None, 0)]
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    for seed, length in enumerate(lengths):
        parent, depth = draw(st.sampled_from(known[:9]))
        keys = chain(length, seed=str(seed), head=parent)
        put(tables, keys, parent=parent, depth=depth)
        known += [(key, depth + nth + 1) for nth, key in enumerate(keys)]
    chance = np.random.default_rng(draw(st.integers(0, 9)))
    ranks = chance.permutation(tables.geometry.num_slots).astype(float)
    return tables, ranks.__getitem__


on_trees = settings(max_examples=examples(100))


@on_trees
@given(trees())
def test_the_order_is_that_of_eviction_from_its_end(tree):
    tables, rank = tree
    assert hottest_first(tables, rank).tolist() == victims(tables, 99, rank=rank)[::-1]


def test_a_block_that_is_read_goes_like_any_other():
    tables, keys = make_tables(), chain(3)
    put(tables, keys)
    take(tables, keys)
    assert len(hottest_first(tables, lambda slots: slots)) == 3


@on_trees
@given(trees())
def test_spans_have_every_block_once_and_parents_first(tree):
    tables, slots = tree[0], hottest_first(*tree)
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


@on_trees
@given(trees(), st.integers(1, 5))
def test_a_chain_goes_to_one_node_and_each_block_to_some(tree, num_targets):
    tables, slots = tree[0], hottest_first(*tree)
    shares = shared_out(tables, slots, num_targets)
    assert sorted(np.concatenate(shares).tolist()) == sorted(slots.tolist())
    heads = [set(tables.slot_head[share].tolist()) for share in shares]
    assert sum(map(len, heads)) == len(set().union(*heads))


@on_trees
@given(trees(), st.integers(1, 60_000), st.integers(1, 9))
def test_batches_keep_within_their_bounds(tree, bytes_max, blocks_max):
    tables, slots = tree[0], hottest_first(*tree)
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
