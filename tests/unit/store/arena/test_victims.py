"""Who goes next is chosen ahead and checked again when it is taken; how much room is made ahead."""

import secrets
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import eviction, lease, slabs, slots, victims
from kvray.store.arena.tables import Array, Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    conversations,
    make_tables,
    matched,
    put,
    store,
    take,
)


def fill(arena: Arena, *, block_bytes: int = SLOT, num_blocks: int = 4) -> None:
    """Store chains until every slot has a block."""
    while slabs.num_available(arena.tables, block_bytes):
        store(arena, chain(num_blocks, seed=secrets.token_hex(4)), block_bytes=block_bytes)


def room(arena: Arena, block_bytes: int = SLOT) -> int:
    return slabs.num_available(arena.tables, block_bytes)


def queue(tables: Tables, chosen: Array) -> None:
    victims.put(tables, SLOT, chosen, tick=tables.counts.tick)


def test_victims_are_taken_in_their_order(tables):
    first, last = put(tables, chain(3, seed="first")), put(tables, chain(3, seed="last"))
    queue(tables, np.concatenate((last.slots[::-1], first.slots[::-1])))
    assert victims.take(tables, SLOT, 2).tolist() == last.slots[:0:-1].tolist()
    assert victims.num_left(tables, SLOT) == 4
    slots.evict(tables, last.slots[1:])
    assert victims.take(tables, SLOT, 9).tolist() == [last.slots[0], *first.slots[::-1]]
    assert victims.take(tables, SLOT, 9).tolist() == []


def test_what_is_protected_or_was_used_or_leased_since_stays(tables):
    names = ("used", "leased", "protected", "idle")
    made = {name: put(tables, chain(2, seed=name)).slots for name in names}
    queue(tables, np.concatenate([slots[::-1] for slots in made.values()]))
    lease.release(tables, take(tables, chain(2, seed="used")))
    take(tables, chain(2, seed="leased"))
    found = victims.take(tables, SLOT, 8, protect=made["protected"][1:])
    assert found.tolist() == made["idle"][::-1].tolist()


def test_a_block_of_another_size_in_the_same_slot_stays(tables):
    made = put(tables, chain(4))
    queue(tables, made.slots[::-1])
    slots.evict(tables, made.slots)
    put(tables, chain(2, seed="large"), block_bytes=2 * SLOT)
    assert victims.take(tables, SLOT, 4).tolist() == []


def test_more_sizes_than_queues_share_them():
    tables = make_tables(num_slabs=12)
    for size in range(1, 12):
        put(tables, chain(1, seed=str(size)), block_bytes=size * 8)
        victims.put(tables, size * 8, np.arange(1), tick=0)
    assert victims.num_left(tables, 88) == 1
    assert sum(victims.num_left(tables, size * 8) for size in range(1, 12)) == 8


@given(st.randoms(use_true_random=False))
def test_queues_of_nonsense_take_nothing_that_may_not_go(chance):
    tables = make_tables(num_slabs=2)
    leased = chain(5, seed="leased")
    put(tables, leased)
    put(tables, chain(5, seed="idle"))
    take(tables, leased)
    for name in ("next", "end", "slot", "tick", "slab", "slab_next", "slab_end"):
        column = getattr(tables, f"queue_{name}").view("u1")
        column[:] = np.frombuffer(chance.randbytes(column.nbytes), "u1")
    tables.queue_bytes[:] = SLOT
    slots.evict(tables, victims.take(tables, SLOT, 3))
    put(tables, chain(9, seed="new"))
    put(tables, chain(2, seed="large"), block_bytes=2 * SLOT)
    victims.pass_slabs(tables)
    assert matched(tables, leased) == 5
    check_invariants(tables)


def test_writers_take_the_blocks_and_clear_the_slab_that_the_owner_chose(arena, monkeypatch):
    fill(arena)
    tables = arena.tables
    assert ArenaOwner(arena).evict_ahead(0.0, lambda chosen: -tables.slot_tick[chosen]) == 0
    last = victims.num_left(tables, SLOT)
    assert last > 4
    going = tables.queue_slot[:2].astype(int)
    names = tables.slot_number[going].copy()
    monkeypatch.setattr(eviction, "choose_victims", None)
    monkeypatch.setattr(slots, "choose_victims", None)
    store(arena, chain(2, seed="new"))
    assert victims.num_left(tables, SLOT) == last - 2
    assert (tables.slot_number[going] != names).all()
    monkeypatch.undo()
    chosen = int(tables.queue_slab[0])
    store(arena, chain(1, seed="large"), block_bytes=2 * SLOT)
    assert tables.slab_block_bytes[chosen] == 2 * SLOT
    assert victims.num_slabs_left(tables) == tables.geometry.num_slabs - 1


def test_owners_choose_when_half_has_gone(arena, monkeypatch):
    fill(arena)
    owner, look = ArenaOwner(arena), Mock(side_effect=eviction.choose_victims)
    monkeypatch.setattr(eviction, "choose_victims", look)
    owner.evict_ahead(0.0)
    store(arena, chain(1, seed="one"))
    owner.evict_ahead(0.0)
    assert look.call_count == 1
    store(arena, chain(victims.num_left(arena.tables, SLOT), seed="many"))
    owner.evict_ahead(0.0)
    owner.evict_ahead(0.0)
    assert look.call_count == 2


def test_of_slabs_used_together_the_end_of_the_prompt_is_cleared_first():
    tables = make_tables(num_slabs=2)
    made = put(tables, chain(16))
    tail = tables.geometry.slab_of(int(made.slots[-1]))
    among = slabs.coldest_first(tables, np.arange(2))[:, 0]
    assert among.tolist() == [tail, 1 - tail]
    cleared = slabs.choose_to_clear(tables, 2, among=among, protect=made.slots[:1])
    assert tables.geometry.slab_of(cleared).tolist() == 8 * [tail]


@given(st.data())
def test_descendants_are_those_of_a_plain_search(data):
    tables, parents = make_tables(), dict[int, int]()
    for seed in range(data.draw(st.integers(1, 6))):
        known = list(parents)
        parent = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else None
        before = None if parent is None else BlockKey(tables.slot_key[parent].tobytes())
        made = put(tables, chain(data.draw(st.integers(1, 9)), seed=str(seed)), parent=before)
        own = made.slots.tolist()
        parents |= zip(own, [-1 if parent is None else parent, *own[:-1]], strict=True)
    found = set(data.draw(st.sets(st.sampled_from(list(parents)), max_size=4)))
    family = slabs.descendants(tables, np.array(sorted(found), dtype=np.int64)).tolist()
    while more := {slot for slot, above in parents.items() if above in found} - found:
        found |= more
    assert family == sorted(found)


@pytest.mark.parametrize("seed", range(4))
def test_another_size_gets_in_where_no_slab_can_be_cleared_alone(arena, seed):
    owner = ArenaOwner(arena)
    for prompt in conversations(300, seed=seed):
        store(arena, prompt)
        owner.evict_ahead(0.05)
    for turn in range(40):
        made = store(arena, chain(2, seed=f"large {turn}"), block_bytes=2 * SLOT)
        assert made.dropped == 0
        owner.evict_ahead(0.05)
    assert slabs.block_sizes(arena.tables) == [2 * SLOT], "nobody uses the others any more"


# -- the room that an owner makes ahead of need ---------------------------------------------------


def test_room_follows_what_writers_take_and_is_not_made_again_for_nobody(arena):
    fill(arena)
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.1)
    quiet = room(arena)
    store(arena, chain(2, seed="a"))
    owner.evict_ahead(0.1)
    assert room(arena) == quiet, "two rounds of that fit into what is free anyway"
    store(arena, chain(quiet, seed="b"))
    owner.evict_ahead(0.0)
    demand = min(2 * quiet, arena.tables.geometry.num_slots // 16)
    assert room(arena) == demand > 0
    assert (owner.evict_ahead(0.0), room(arena)) == (0, demand)


def test_a_size_whose_blocks_are_younger_gets_the_slabs_of_another(arena):
    store(arena, chain(2, seed="small"))
    fill(arena, block_bytes=2 * SLOT)
    store(arena, chain(6, seed="younger"))
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.0)
    for seed in range(6):
        store(arena, chain(2, seed=f"small {seed}"))
        owner.evict_ahead(0.5)
    own = slabs.slots_of(arena.tables, SLOT)
    assert len(own) > arena.tables.geometry.slots_per_slab


def test_a_slab_that_is_younger_than_a_sizes_own_blocks_stays(arena):
    store(arena, chain(8, seed="small"))
    fill(arena, block_bytes=2 * SLOT)
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.0)
    before = len(slabs.slots_of(arena.tables, 2 * SLOT))
    assert owner.evict_ahead(0.13) > 0
    assert len(slabs.slots_of(arena.tables, 2 * SLOT)) == before
    assert victims.num_slabs_left(arena.tables) > 0


def test_a_slab_with_a_lease_is_not_cleared(arena):
    store(arena, chain(2, seed="small"))
    fill(arena, block_bytes=2 * SLOT, num_blocks=1)
    owner, tables = ArenaOwner(arena), arena.tables
    owner.evict_ahead(0.0)
    first = int(victims.next_slabs(tables, SLOT)[0])
    chosen = slabs.slots_of(tables, 2 * SLOT)
    chosen = chosen[tables.geometry.slab_of(chosen) == first]
    assert arena.lease_slots(chosen[:1])
    store(arena, chain(6, seed="younger"))
    owner.evict_ahead(0.5)
    assert tables.slab_block_bytes[first] == 2 * SLOT


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rounds_end_with_nothing_to_evict(arena, share):
    fill(arena)
    owner = ArenaOwner(arena)
    while owner.evict_ahead(share):
        check_invariants(arena.tables)
