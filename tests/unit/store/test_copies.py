"""Extra copies: which they are, and that only they go first, the longest unused one before all."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.store import Arena
from kvray.store.arena import key_index
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.tables import Array
from kvray.store.copies import FRESH_S, CopyMarks, are_extra
from kvray.store.retention import Retention
from tests.unit.store.small_arena import SLOT, chain, make_arena, make_tables, put, store

NODES = "abcd"
HELD = st.lists(
    st.tuples(st.integers(1, 2**24 - 1), st.sets(st.sampled_from(NODES), min_size=1)), min_size=1
)


@given(HELD)
def test_of_all_holders_of_a_block_one_counts_as_the_original(
    held: list[tuple[int, set[str]]],
) -> None:
    heads = np.array([head for head, _ in held], dtype="<u4")
    has = {node: np.array([node in holders for _, holders in held]) for node in NODES}
    extra = np.zeros(len(held), dtype=int)
    for node in NODES:
        others = {other: mask for other, mask in has.items() if other != node}
        extra += has[node] & are_extra(heads, node, others)
    assert extra.tolist() == [len(holders) - 1 for _, holders in held]


def test_of_a_chain_one_node_has_all_originals_and_of_many_each_has_some() -> None:
    everybody = {node: np.ones(300, dtype=bool) for node in "bc"}
    assert len(set(are_extra(np.full(300, 7), "a", everybody).tolist())) == 1
    num_extra = int(are_extra(np.arange(300), "a", everybody).sum())
    assert 150 < num_extra < 250


EVENTS = st.lists(
    st.tuples(st.sampled_from(NODES), st.sampled_from(["fetch", "look up", "let go"])), max_size=60
)


@given(st.integers(1, 2**24 - 1), st.sampled_from(NODES), EVENTS)
def test_however_old_a_look_is_the_last_holder_never_lets_go_of_an_extra_copy(
    head: int, first: str, events: list[tuple[str, str]]
) -> None:
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


@given(TIMES, st.integers(0, 40), st.booleans())
def test_extra_copies_that_are_idle_or_beyond_the_bound_go_first_and_no_others(
    blocks: list[tuple[bool, int]], most: int, is_stale: bool
) -> None:
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
    idle = used_at[slots][first]
    assert not len(idle) or not stay.any() or idle.min() <= used_at[slots][stay].min()
    if is_extra.sum() <= most:
        assert (first == (is_extra & (now - used_at[slots] >= 60.0))).all()
    assert not marks.go_first(tables, slots, now=now + FRESH_S + 1.0).any(), "it is too old"


def test_what_was_found_of_a_block_does_not_count_for_the_next_one_in_its_slot() -> None:
    tables = make_tables(num_slabs=1)
    slots = put(tables, chain(3)).slots
    marks = CopyMarks(tables.geometry.num_slots)
    marks.note(slots, tables.slot_number[slots] + 1, np.ones(3, dtype=bool), now=1.0)
    used_at = np.zeros(tables.geometry.num_slots)
    marks.choose(tables, used_at, used_at.take, now=99.0, idle_s=1.0, bytes_max=0)
    assert not marks.go_first(tables, slots, now=1.0).any()
    assert marks.num_bytes == 0


def due(marks: CopyMarks, tables: object, used_at: Array, now: float, most: int = 4) -> list[int]:
    found = marks.due(tables, used_at, now=now, soon_s=5.0, again_s=15.0, most=most)  # type: ignore[arg-type]
    return list(found.tolist())


def test_new_blocks_are_looked_up_first_and_extra_copies_that_go_next_more_often() -> None:
    tables = make_tables()
    slots = put(tables, chain(8)).slots
    tables.slot_head[slots[7]] = 0  # its chain is not known
    marks, used_at = CopyMarks(tables.geometry.num_slots), np.zeros(tables.geometry.num_slots)
    used_at[slots] = np.arange(8)[::-1]
    first = due(marks, tables, used_at, 100.0)
    assert first == slots[:4].tolist()
    is_extra = np.array([True, True, True, False])
    marks.note(slots[:4], tables.slot_number[slots[:4]], is_extra, now=100.0)
    assert due(marks, tables, used_at, 101.0) == slots[4:7].tolist()
    nothing = np.zeros(3, dtype=bool)
    marks.note(slots[4:7], tables.slot_number[slots[4:7]], nothing, now=101.0)
    assert due(marks, tables, used_at, 104.0) == []
    assert due(marks, tables, used_at, 105.0) == [slots[2], slots[1]]
    assert due(marks, tables, used_at, 115.0) == [slots[2], slots[1], slots[0], slots[3]]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = make_arena(tmp_path)
    made.join("shard")
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_copies_are_evicted_first_the_longest_unused_before_all_and_leaves_before_parents(
    arena: Arena, policy: str
) -> None:
    retention, tables = Retention(arena, policy, "all"), arena.tables
    names = ("original", "copy", "later copy")
    chains = {name: chain(6, seed=name) for name in names}
    for name in names:
        store(arena, chains[name])
        retention.observe()
    found = {
        name: key_index.find(tables, key_index.pack_keys(keys), 0) for name, keys in chains.items()
    }
    extra = np.concatenate((found["copy"], found["later copy"]))
    marks, now = retention.copies, float(retention.uses.used_at.max())
    retention.uses.used_at[found["copy"]] -= 50.0
    marks.note(extra, tables.slot_number[extra], np.ones(12, dtype=bool), now=now)
    rank = retention.rank_alone
    marks.choose(tables, retention.uses.used_at, rank, now=now, idle_s=0.0, bytes_max=2**30)

    going = choose_victims(tables, 18, within=np.arange(tables.num_backed), rank=retention.rank)

    order = [*found["copy"][::-1], *found["later copy"][::-1], *found["original"][::-1]]
    assert going.tolist() == order
    assert not retention.admits(extra).any(), "no copy is written to disk"
    assert retention.admits(found["original"]).all()


def test_a_copy_that_may_stay_is_worth_a_tenth_of_what_no_other_node_has(arena: Arena) -> None:
    retention, tables = Retention(arena, "gittins", "all"), arena.tables
    keys = chain(6)
    store(arena, keys)
    retention.observe()
    slots = key_index.find(tables, key_index.pack_keys(keys), 0)
    marks, now = retention.copies, float(retention.uses.used_at.max())
    marks.note(slots, tables.slot_number[slots], np.arange(6) >= 3, now=now)
    marks.choose(
        tables, retention.uses.used_at, retention.rank_alone, now=now, idle_s=60.0, bytes_max=2**30
    )
    time.sleep(0.05)
    alone, ranks = retention.rank_alone(slots), retention.rank(slots)
    # Nothing is learned yet, so ranks are negative ages.
    assert (ranks[3:] < 5 * alone[3:]).all()
    assert (ranks[:3] > 5 * alone[:3]).all()
