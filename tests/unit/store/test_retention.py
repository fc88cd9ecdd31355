"""What a shard knows of its blocks: which stay, which are copies, and why some have left."""

import time
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, PartRequest, block_history
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.store.block_history import AHEAD, CAUSES, CLEARED, HOST, NVME, WRITER, BlockHistory
from kvray.store.copies import FRESH_S, CopyMarks, are_extra
from kvray.store.policy import POLICIES
from kvray.store.retention import Retention, UseCounts, hot_prefixes
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    leased_for,
    make_tables,
    put,
    served,
    store,
    victims,
)

BOTH = [[PartRequest(0), PartRequest(1)]]


def slots_of(arena: Arena, keys: list[BlockKey]) -> Array:
    return key_index.find(arena.tables, key_index.pack_keys(keys), 0)


def test_blocks_rank_by_their_last_use_and_what_was_given_up_goes_first(arena):
    retention = Retention(arena, "lru", "all")
    old, new = chain(4, seed="old"), chain(4, seed="new")

    def ranks(keys: list[BlockKey]) -> Array:
        retention.observe()
        return retention.rank(slots_of(arena, keys))

    store(arena, old)
    store(arena, new)
    assert (ranks(old) < ranks(new)).all()
    served(arena, old)
    assert (ranks(old) > ranks(new)).all()
    ArenaOwner(arena).give_up(b"".join(old[3:]), [0])
    assert ranks(old).argmin() == 3
    assert ranks(old)[3] == -np.inf


@pytest.mark.parametrize("policy", POLICIES)
def test_what_came_since_the_last_look_goes_last(arena, policy):
    retention, owner = Retention(arena, policy, "all"), ArenaOwner(arena)
    for number in range(8):
        store(arena, chain(7, seed=str(number)))
        retention.observe()
    owner.evict_ahead(0.5, retention.rank)
    new, left = chain(7, seed="new"), arena.stats()["blocks"]
    store(arena, new)
    owner.evict_ahead(0.8, retention.rank)
    assert arena.stats()["blocks"] < left, "others went"
    assert arena.present(new, [0])[0].all()


def test_what_was_found_once_is_worth_its_write(arena):
    retention = Retention(arena, "lru", "twice")
    once, twice = chain(4, seed="once"), chain(4, seed="twice")
    store(arena, once)
    store(arena, twice)
    retention.observe()
    served(arena, twice)
    retention.observe()
    assert retention.admits(slots_of(arena, twice)).all()
    assert not retention.admits(slots_of(arena, once)).any()


@pytest.mark.parametrize("admission", ["twice", "likely"])
def test_what_is_worth_its_write_is_so_in_all_its_parts(arena, admission, monkeypatch):
    clock, hot = Mock(), chain(4, seed="hot")
    monkeypatch.setattr("kvray.store.retention.time", clock)
    retention = Retention(arena, "lru", admission)
    for turn in range(150):
        clock.monotonic.return_value = 10.0 * turn
        cold = chain(4, seed=str(turn))
        for keys, part in product((hot, cold), (0, 1)):
            store(arena, keys, part=part)
        assert arena.release(*leased_for(arena, hot, BOTH).leases)
        retention.observe()
    for keys, is_worth_it in ((hot, True), (cold, False)):
        for part in (0, 1):
            slots = key_index.find(arena.tables, key_index.pack_keys(keys), part)
            assert retention.admits(slots).tolist() == 4 * [is_worth_it]


# -- extra copies ---------------------------------------------------------------------------------


NODES = "abcd"
HEADS, HOLDERS = st.integers(1, 2**24 - 1), st.sets(st.sampled_from(NODES), min_size=1)


@given(st.lists(st.tuples(HEADS, HOLDERS), min_size=1))
def test_one_holder_of_a_block_has_the_original(held):
    heads = np.array([head for head, _ in held], dtype="<u4")
    has = {node: np.array([node in holders for _, holders in held]) for node in NODES}
    extra = np.zeros(len(held), dtype=int)
    for node in NODES:
        others = {other: mask for other, mask in has.items() if other != node}
        extra += has[node] & are_extra(heads, node, others)
    assert extra.tolist() == [len(holders) - 1 for _, holders in held]


def test_of_a_chain_one_node_has_all_originals_and_of_many_each_has_some():
    everybody = {node: np.ones(300, dtype=bool) for node in "bc"}
    assert len(set(are_extra(np.full(300, 7), "a", everybody).tolist())) == 1
    num_extra = int(are_extra(np.arange(300), "a", everybody).sum())
    assert 150 < num_extra < 250


EVENTS = st.lists(
    st.tuples(st.sampled_from(NODES), st.sampled_from(["fetch", "look up", "let go"])), max_size=60
)


@given(HEADS, st.sampled_from(NODES), EVENTS)
def test_however_old_a_look_is_the_last_holder_never_lets_go_of_an_extra_copy(head, first, events):
    holders, seen = {first}, dict[str, set[str]]()
    for node, event in events:
        if event == "fetch":
            holders.add(node)
        elif event == "look up":
            seen[node] = set(holders)
        elif node in holders:
            others = {other: np.ones(1, dtype=bool) for other in seen.get(node, set()) - {node}}
            if are_extra(np.array([head]), node, others).all():
                holders.discard(node)
        assert holders


TIMES = st.lists(st.tuples(st.booleans(), st.integers(0, 200)), min_size=40, max_size=40)


@given(TIMES, st.integers(0, 40))
def test_extra_copies_that_are_idle_or_beyond_the_bound_alone_go_first(blocks, most):
    tables = make_tables()
    slots = put(tables, chain(40)).slots
    used_at = np.zeros(tables.geometry.num_slots)
    used_at[slots] = [age for _, age in blocks]
    marks, is_extra = CopyMarks(tables.geometry.num_slots), np.array([one for one, _ in blocks])
    now = 200.0
    marks.note(slots, tables.slot_number[slots], is_extra, now=now)
    for _ in range(2):  # at first as many are said to come again
        marks.choose(tables, used_at, used_at.take, now=now, idle_s=60.0, bytes_max=most * SLOT)
    first = marks.go_first(tables, slots, now=now)
    assert not (first & ~is_extra).any()
    assert (first | ~is_extra | (now - used_at[slots] < 60.0)).all()
    stay = is_extra & ~first
    assert stay.sum() <= most, "the bound holds"
    assert marks.num_bytes == is_extra.sum() * SLOT
    idle, kept = used_at[slots][first], used_at[slots][stay]
    assert not len(idle) or not len(kept) or idle.min() <= kept.min()
    if is_extra.sum() <= most:
        assert (first == (is_extra & (now - used_at[slots] >= 60.0))).all()
    assert not marks.go_first(tables, slots, now=now + FRESH_S + 1.0).any(), "it is too old"


def test_what_was_found_of_a_block_does_not_count_for_the_next_one_in_its_slot():
    tables = make_tables(num_slabs=1)
    slots = put(tables, chain(3)).slots
    marks = CopyMarks(tables.geometry.num_slots)
    marks.note(slots, tables.slot_number[slots] + 1, np.ones(3, dtype=bool), now=1.0)
    used_at = np.zeros(tables.geometry.num_slots)
    marks.choose(tables, used_at, used_at.take, now=99.0, idle_s=1.0, bytes_max=0)
    assert not marks.go_first(tables, slots, now=1.0).any()
    assert marks.num_bytes == 0


def test_new_blocks_are_looked_up_first_and_extra_copies_that_go_next_more_often():
    tables = make_tables()
    slots = put(tables, chain(8)).slots
    tables.slot_head[slots[7]] = 0  # its chain is not known
    marks, used_at = CopyMarks(tables.geometry.num_slots), np.zeros(tables.geometry.num_slots)
    used_at[slots] = np.arange(8)[::-1]

    def due(now: float) -> list[int]:
        found = marks.due(tables, used_at, now=now, soon_s=5.0, again_s=15.0, most=4)
        return list(np.searchsorted(slots, found))

    assert due(100.0) == [0, 1, 2, 3]
    is_extra = np.array([True, True, True, False])
    marks.note(slots[:4], tables.slot_number[slots[:4]], is_extra, now=100.0)
    assert due(101.0) == [4, 5, 6]
    marks.note(slots[4:7], tables.slot_number[slots[4:7]], np.zeros(3, dtype=bool), now=101.0)
    assert [due(now) for now in (104.0, 105.0, 115.0)] == [[], [2, 1], [2, 1, 0, 3]]


def mark(retention: Retention, slots: Array, is_extra: Array, *, idle_s: float) -> None:
    """Say now of which blocks other nodes have copies; of those used since then some may stay."""
    marks, tables, used_at = retention.copies, retention._arena.tables, retention.uses.used_at
    now = float(used_at.max())
    marks.note(slots, tables.slot_number[slots], is_extra, now=now)
    alone = retention.rank_alone
    marks.choose(tables, used_at, alone, now=now, idle_s=idle_s, bytes_max=2**30)


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_copies_go_first_the_longest_unused_before_all(arena, policy):
    retention, found = Retention(arena, policy, "all"), dict[str, Array]()
    for name in ("original", "copy", "later copy"):
        found[name] = store(arena, chain(6, seed=name)).slots
        retention.observe()
    extra = np.concatenate((found["copy"], found["later copy"]))
    retention.uses.used_at[found["copy"]] -= 50.0
    mark(retention, extra, np.ones(12, dtype=bool), idle_s=0.0)
    order = [*found["copy"][::-1], *found["later copy"][::-1], *found["original"][::-1]]
    assert victims(arena.tables, 18, rank=retention.rank) == order
    assert not retention.admits(extra).any(), "no copy is written to disk"
    assert retention.admits(found["original"]).all()


def test_a_copy_that_may_stay_is_worth_a_tenth_of_what_no_other_node_has(arena):
    retention, slots = Retention(arena, "gittins", "all"), store(arena, chain(6)).slots
    retention.observe()
    mark(retention, slots, np.arange(6) >= 3, idle_s=60.0)
    time.sleep(0.05)
    ratio = retention.rank(slots) / retention.rank_alone(slots)
    # Nothing is learned yet, so ranks are negative ages.
    assert ((ratio > 5) == (np.arange(6) >= 3)).all()


# -- which prefixes are used most -----------------------------------------------------------------


def test_common_beginnings_and_what_goes_on_more_often_are_told_until_their_blocks_go(arena):
    tables, uses = arena.tables, UseCounts(arena.tables.geometry.num_slots)
    keys = chain(6)
    store(arena, keys)
    for now, used in ((1.0, 2), (2.0, 2), (3.0, 5)):
        uses.note(slots_of(arena, keys[:used]), now=now)
    found = hot_prefixes(tables, uses, namespace=0, most=10, now=10.0)
    assert found == [
        {"key": keys[1].hex()[:8], "num_blocks": 2, "uses": 3, "used_s_ago": 7.0},
        {"key": keys[4].hex()[:8], "num_blocks": 5, "uses": 1, "used_s_ago": 7.0},
        {"key": keys[5].hex()[:8], "num_blocks": 6, "uses": 0, "used_s_ago": None},
    ]
    assert hot_prefixes(tables, uses, namespace=0, most=1, now=10.0) == found[:1]
    assert hot_prefixes(tables, uses, namespace=7, most=10, now=10.0) == []
    uses.forget(slots_of(arena, keys[:1]), now=4.0)  # another block has come
    counts, used_at = uses.of(slots_of(arena, keys[:3]))
    assert (counts.tolist(), used_at.tolist()) == ([0, 3, 1], [0.0, 3.0, 3.0])


# -- what is remembered of blocks that have left --------------------------------------------------


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype="<u8")


def test_the_latest_departure_of_a_block_is_told_with_its_time_tier_and_cause():
    gone = BlockHistory(8)
    gone.note(words(1, 2), HOST, AHEAD, now=10.0)
    gone.note(words(2), NVME, CLEARED, now=20.0)
    found = gone.of(words(2, 1, 3))
    assert found["at"].tolist() == [20.0, 10.0, 0.0]
    assert found["tier"][:2].tolist() == [NVME, HOST]
    assert found["cause"][:2].tolist() == [CLEARED, AHEAD]
    for moment, at in ((15.0, 10.0), (5.0, 0.0)):
        assert gone.of(words(2), before=moment)["at"].tolist() == [at], "what left before counts"
    assert gone.counts() == {"ahead": 2, "cleared": 1}


def test_what_its_owner_noted_of_a_tier_is_not_put_down_to_a_writer():
    gone = BlockHistory(8)
    gone.note(words(1, 2, 4), HOST, AHEAD, now=10.0)
    gone.note_rest(words(4), NVME, np.full(1, block_history.CORRUPT), now=10.5)
    found = gone.of(words(4))
    assert (found["tier"].tolist(), found["cause"].tolist()) == ([NVME], [block_history.CORRUPT])
    gone.note_rest(words(2, 3), HOST, np.full(2, WRITER), now=11.0)
    assert gone.of(words(1, 2, 3))["cause"].tolist() == [AHEAD, AHEAD, WRITER]
    # Found once: the next time it was somebody else.
    gone.note_rest(words(2), HOST, np.full(1, WRITER), now=12.0)
    assert gone.of(words(2))["cause"].tolist() == [WRITER]


def test_the_oldest_are_forgotten_and_it_is_told_from_when_on_all_are_known():
    began = time.time()
    gone = BlockHistory(4)
    assert gone.since >= began
    for number in range(6):
        gone.note(words(number), HOST, AHEAD, now=float(number))
    assert gone.of(words(0, 1, 2))["at"].tolist() == [0.0, 0.0, 2.0]
    assert gone.since == 2.0
    gone.note(words(*range(100, 110)), HOST, AHEAD, now=9.0)
    assert gone.of(words(105, 106, 109))["at"].tolist() == [0.0, 9.0, 9.0]


@pytest.mark.parametrize("cause", ["cleared", "ahead"])
def test_an_owner_says_why_blocks_went(arena, cause):
    owner, keys = ArenaOwner(arena), chain(arena.tables.geometry.num_slots)
    store(arena, keys)
    owner.clear() if cause == "cleared" else owner.evict_ahead(1.0)
    found = owner.history.of(np.frombuffer(b"".join(keys), "<u8")[::4])
    assert found["at"].min() > time.time() - 60
    assert {CAUSES[one] for one in found["cause"].tolist()} == {cause}
