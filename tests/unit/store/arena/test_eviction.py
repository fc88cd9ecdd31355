"""Who goes first: least recently used, a prefix from its tail, never what somebody leases.

Blocks that are of no use any more go before all others.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import lease
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    NOBODY,
    chain,
    evict,
    fetch,
    find,
    make_tables,
    matched,
    put,
    reserve,
    store,
    take,
)


def victims(tables: Tables, count: int, *, protect: Array = NOBODY) -> list[int]:
    within = np.arange(tables.geometry.num_slots)
    return list(choose_victims(tables, count, within=within, protect=protect).tolist())


def touch(tables: Tables, keys: list[BlockKey]) -> None:
    lease.release(tables, take(tables, keys))


def test_tail_goes_before_its_parents(tables: Tables) -> None:
    made = put(tables, chain(6))
    assert victims(tables, 4) == made.slots[:1:-1].tolist()


def test_least_recently_used_chain_goes_first(tables: Tables) -> None:
    first, second = put(tables, chain(3, seed="a")), put(tables, chain(3, seed="b"))
    touch(tables, chain(3, seed="a"))
    assert set(victims(tables, 3)) == set(second.slots.tolist())
    assert victims(tables, 4)[3] == first.slots[-1]


def test_chain_that_was_stored_in_pieces_is_as_young_as_its_last_piece(tables: Tables) -> None:
    keys = chain(12)
    put(tables, keys[:4])
    other = put(tables, chain(4, seed="other"))
    put(tables, keys[4:8], parent=keys[3], depth=4)
    put(tables, keys[8:], parent=keys[7], depth=8)
    assert set(victims(tables, 4)) == set(other.slots.tolist())
    assert victims(tables, 16)[4:] == find(tables, keys)[::-1]


def test_one_long_chain_in_pieces_gives_all_that_is_asked() -> None:
    tables = make_tables(num_slabs=64)
    keys = chain(512)
    for start in range(0, 512, 4):
        put(tables, keys[start : start + 4], parent=keys[start - 1] if start else None, depth=start)
    made = put(tables, chain(400, seed="new"))
    assert (len(made.slots), made.dropped) == (400, 0)
    assert matched(tables, keys) == 112
    check_invariants(tables)


def test_refreshed_head_lets_the_tail_go_first(tables: Tables) -> None:
    keys = chain(6)
    made = put(tables, keys)
    touch(tables, keys[:3])
    assert victims(tables, 3) == made.slots[:2:-1].tolist()


def test_refreshed_tail_keeps_its_whole_chain_young(tables: Tables) -> None:
    keys, other = chain(6), chain(6, seed="other")
    put(tables, keys)
    made = put(tables, other)
    touch(tables, keys[5:])
    assert set(victims(tables, 6)) == set(made.slots.tolist())


def test_fork_waits_for_all_its_branches(tables: Tables) -> None:
    trunk, left, right = chain(2), chain(2, seed="l"), chain(2, seed="r")
    put(tables, trunk)
    put(tables, left, parent=trunk[1], depth=2)
    put(tables, right, parent=trunk[1], depth=2)
    touch(tables, left)
    assert victims(tables, 99) == [
        *find(tables, right)[::-1],
        *find(tables, left)[::-1],
        *find(tables, trunk)[::-1],
    ]


def test_leased_block_and_its_ancestors_stay(tables: Tables) -> None:
    keys = chain(6)
    made = put(tables, keys)
    take(tables, keys[3:4])
    assert victims(tables, 99) == made.slots[:3:-1].tolist()


def test_block_that_is_being_written_keeps_its_ancestors(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys[:3])
    reserve(tables, keys[3:], parent=keys[2], depth=3)
    assert victims(tables, 99) == []


def test_protected_blocks_stay(tables: Tables) -> None:
    made = put(tables, chain(6))
    assert victims(tables, 99, protect=made.slots[3:4]) == made.slots[:3:-1].tolist()


def test_only_slots_within_are_chosen(tables: Tables) -> None:
    made, other = put(tables, chain(3)), put(tables, chain(3, seed="other"))
    chosen = choose_victims(tables, 99, within=other.slots, protect=NOBODY)
    assert set(chosen.tolist()) == set(other.slots.tolist())
    assert not set(chosen.tolist()) & set(made.slots.tolist())


def test_nothing_is_chosen_when_nothing_is_wanted(tables: Tables) -> None:
    put(tables, chain(3))
    assert victims(tables, 0) == []


def test_save_extends_its_own_chain_in_a_full_arena_without_losing_it(tables: Tables) -> None:
    keys = chain(64)
    put(tables, keys[:60])
    put(tables, chain(4, seed="other"))
    made = put(tables, keys)
    assert (made.rows.tolist(), made.dropped) == ([60, 61, 62, 63], 0)
    assert matched(tables, keys) == 64


trees = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 6)), min_size=1, max_size=14)
"""Pieces to store: (which of the blocks that are there to hang it from, length)."""


@settings(max_examples=examples(60))
@given(trees, st.lists(st.integers(0, 1000), max_size=6), st.integers(0, 64), st.integers(0, 3))
def test_eviction_is_lru_by_subtree(
    pieces: list[tuple[int, int]], touched: list[int], count: int, num_leased: int
) -> None:
    tables = make_tables()
    known: list[tuple[BlockKey, int]] = []
    for number, (where, length) in enumerate(pieces):
        parent, depth = known[where % len(known)] if known and where % 4 else (None, -1)
        keys = chain(length, seed=f"piece {number}")
        made = put(tables, keys, parent=parent, depth=depth + 1)
        known += [(keys[row], depth + 1 + int(row)) for row in made.rows]
        known = [one for one in known if find(tables, [one[0]])[0] >= 0]
    for which in touched:
        touch(tables, [known[which % len(known)][0]])
    for which in touched[:num_leased]:
        take(tables, [known[which % len(known)][0]])
    expected = slow_victims(tables, count)
    chosen = victims(tables, count)
    assert [ticks_below(tables, slot) for slot in chosen] == [
        ticks_below(tables, slot) for slot in expected
    ]
    assert evict(tables, count) == len(expected)
    check_invariants(tables)


def slow_victims(tables: Tables, count: int) -> list[int]:
    """Take the oldest leaf, again and again: what `choose_victims` must equal."""
    left = set(np.flatnonzero(tables.slot_state == READY).tolist())
    chosen: list[int] = []
    while len(chosen) < count:
        parents = {int(tables.slot_parent[slot]) for slot in left}
        leaves = [s for s in left if s not in parents and not tables.slot_leases[s]]
        if not leaves:
            break
        chosen.append(
            min(leaves, key=lambda s: (ticks_below(tables, s), -int(tables.slot_depth[s])))
        )
        left.remove(chosen[-1])
    return chosen


def ticks_below(tables: Tables, slot: int) -> int:
    """Return when the block in `slot`, or the youngest of those that hang from it, was used."""
    children = np.flatnonzero((tables.slot_parent == slot) & (tables.slot_state == READY))
    return max([int(tables.slot_tick[slot]), *(ticks_below(tables, int(c)) for c in children)])


def give_up_victims(arena: Arena, count: int) -> list[int]:
    within = np.arange(arena.tables.geometry.num_slots)
    return list(choose_victims(arena.tables, count, within=within, protect=NOBODY).tolist())


def give_up(arena: Arena, keys: list[BlockKey], *parts: int) -> int:
    return ArenaOwner(arena).give_up(b"".join(keys), parts)


def test_what_is_given_up_goes_before_what_is_older(arena: Arena) -> None:
    store(arena, chain(3, seed="old"))
    useless = store(arena, chain(2, seed="useless"))
    assert give_up(arena, chain(2, seed="useless"), 0) == 2
    assert give_up_victims(arena, 2) == useless.slots[::-1].tolist()


def test_only_the_parts_that_are_named_are_given_up(arena: Arena) -> None:
    keys = chain(1)
    store(arena, keys, part=0)
    other = store(arena, keys, part=1)
    assert give_up(arena, keys, 1, 2) == 1
    assert give_up_victims(arena, 1) == other.slots.tolist()


def test_what_is_leased_or_not_here_is_left_alone(arena: Arena) -> None:
    store(arena, chain(2))
    held = arena.lease(chain(2))
    assert held
    assert give_up(arena, chain(2) + chain(3, seed="elsewhere"), 0) == 0
    assert give_up(arena, [], 0) == 0
    assert give_up(arena, chain(2)) == 0


def test_a_parent_stays_as_long_as_its_child_is_used(arena: Arena) -> None:
    keys = chain(2)
    old = store(arena, chain(1, seed="old"))
    store(arena, keys)
    assert give_up(arena, keys[:1], 0) == 1
    assert give_up_victims(arena, 1) == old.slots.tolist()


def test_what_is_used_again_is_as_good_as_any_other(arena: Arena) -> None:
    keys = chain(2)
    store(arena, keys)
    other = store(arena, chain(2, seed="other"))
    assert give_up(arena, keys, 0) == 2
    held = arena.lease(keys)
    assert held is not None
    assert fetch(arena, keys, held[0])
    arena.release(*held)
    assert set(give_up_victims(arena, 2)) == set(other.slots.tolist())
