"""What is wrong in an arena's tables is found, said and mended; a step under way is not wrong."""

from collections.abc import Callable

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner, PartRequest
from kvray.store.arena import audit, lease, repair, slabs
from kvray.store.arena.events import EventReader
from kvray.store.arena.layout import FREE, LIMBO, PAGE_SLOTS, QUARANTINED, READY
from kvray.store.arena.lease import Lease
from kvray.store.arena.slots import Reservation
from kvray.store.arena.tables import Tables
from kvray.store.scan import scan
from tests.unit.store.invariants import check_invariants
from tests.unit.store.scene import NOW, OPERATIONS, Scene, slots_named
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    fetch,
    find,
    leased,
    matched,
    overwrite,
    pool_of,
    put,
    reserve,
    reserved,
    store,
    take,
)
from tests.unit.store.write_log import Replay, record

KEYS = chain(6)


def found(arena: Arena) -> set[str]:
    return {
        name for share in audit.shares(arena.tables) for name in audit.find(arena.tables, share)
    }


@pytest.fixture
def stored(arena: Arena) -> Arena:
    store(arena, KEYS)
    store(arena, KEYS, part=1)
    assert arena.lease(KEYS)
    assert not found(arena)
    return arena


def first_ready(tables: Tables) -> int:
    return int(np.flatnonzero(tables.slot_state == READY)[1])


DAMAGES: dict[str, Callable[[Tables, int], None]] = {
    "slabs": lambda tables, at: tables.slab_block_bytes.__setitem__(7, 2**40),
    "states": lambda tables, at: tables.slot_state.__setitem__(at, 66),
    "parents": lambda tables, at: tables.slot_parent.__setitem__(at, 2**30),
    "children": lambda tables, at: tables.slot_children.__setitem__(at, 5),
    "index": lambda tables, at: tables.slot_part.__setitem__(at, 3),
    "entries": lambda tables, at: tables.columns["index_slot"].__setitem__(5, 2**31),
    "leases": lambda tables, at: tables.slot_leases.__setitem__(at, 0),
    "records": lambda tables, at: tables.page_next.__setitem__(0, 2**20),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_is_found_by_its_name_and_mended_by_the_owner(stored: Arena, name: str) -> None:
    DAMAGES[name](stored.tables, first_ready(stored.tables))
    assert name in found(stored)
    owner = ArenaOwner(stored)
    assert name in owner.audit()
    assert not owner.audit()
    check_invariants(stored.tables)
    assert stored.stats()["repairs"] == 1


def test_a_step_that_only_seems_begun_does_not_keep_engines_out(stored: Arena) -> None:
    stored.tables.header["undo_count"] = 2**40
    assert stored.match(KEYS) is None
    ArenaOwner(stored).audit()
    assert stored.match(KEYS) == 6
    check_invariants(stored.tables)


def test_what_is_repaired_still_has_its_blocks_and_its_leases(stored: Arena) -> None:
    leases = stored.lease(KEYS)
    assert leases
    stored.tables.slot_parent[first_ready(stored.tables)] = 2**30
    assert ArenaOwner(stored).audit() == {"parents": 1, "children": 1}
    assert fetch(stored, KEYS, leases[0])
    assert stored.release(*leases)
    both = stored.lease_for(KEYS, [[PartRequest(0), PartRequest(1)]])
    assert both is not None
    assert both.num_blocks == 6
    assert stored.release(*both.leases)


@pytest.mark.parametrize("seed", range(3))
def test_tables_that_are_overwritten_as_a_whole_are_looked_at_and_mended(
    stored: Arena, seed: int
) -> None:
    overwrite(stored.tables, seed)
    figures = stored.stats()
    assert figures["resident_bytes"] <= figures["capacity_bytes"]
    assert set(scan(stored, lambda done, total: None).damage) >= {"slabs", "states", "children"}
    owner = ArenaOwner(stored)
    assert owner.audit()
    assert not owner.audit()
    check_invariants(stored.tables)
    owner.evict_ahead(1.0)
    stored.leave()  # its place is overwritten, too
    stored.join("again")
    assert fetch_all(stored)


def fetch_all(arena: Arena) -> bool:
    """Store and read blocks as if nothing had been."""
    keys = chain(3, seed="after")
    store(arena, keys)
    leases = arena.lease(keys)
    return bool(leases) and fetch(arena, keys, leases[0])


def test_a_slot_that_comes_to_claim_another_block_is_not_committed(arena: Arena) -> None:
    made = reserved(arena, KEYS)
    arena.tables.slot_part[made.slots[2]] ^= 1
    assert arena.commit(made, arena.write(made, pool_of(KEYS), np.arange(6)))
    assert arena.match(KEYS) == 2
    assert not arena.present(KEYS, [1])[0].any()
    assert arena.tables.slot_state[made.slots[2]] == FREE
    ArenaOwner(arena).audit()
    check_invariants(arena.tables)


def test_entries_of_the_index_that_name_no_slot_are_misses(stored: Arena) -> None:
    entries = stored.tables.columns["index_slot"]
    entries[entries > 0] += np.uint32(2**31)
    assert not stored.present(KEYS, [0])[0].any()
    assert stored.lease(KEYS) == []
    assert stored.lease(KEYS[:1]) == []


def test_an_arena_in_use_is_not_taken_for_damaged(arena: Arena) -> None:
    owner = ArenaOwner(arena)
    for number in range(60):
        keys = chain(5, seed=str(number))
        made = store(arena, keys[:2])
        more = reserved(arena, keys[2:], parent=keys[1], depth=2)
        held = arena.lease(keys)
        assert held
        assert len(made.slots) == 2
        assert not owner.audit()
        arena.release(*held)
        arena.abort(more)
        owner.evict_ahead(0.5)
        assert not owner.audit()


SIZE = 3000  # rounded up to a slot, so many other sizes have as many slots
WANTED = [[PartRequest(0, None, SIZE)]]


@pytest.mark.parametrize("column", ["slab_block_bytes", "slab_check"])
@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_of_a_slabs_size_is_found_and_costs_nobody_a_block(
    arena: Arena, column: str, bit: int
) -> None:
    store(arena, KEYS[:3], block_bytes=SIZE)
    sizes, check = arena.tables.slab_block_bytes.copy(), arena.tables.slab_check.copy()
    before = arena.lease_for(KEYS, WANTED)
    assert before is not None
    slab = arena.tables.geometry.slab_of(int(before.slots[0][0]))
    getattr(arena.tables, column)[slab] ^= np.uint64(1 << bit)
    assert "slabs" in found(arena)
    between = arena.lease_for(KEYS, WANTED)
    assert between is not None
    for held in (before, between):
        assert fetch(arena, KEYS, held.leases[0], block_bytes=SIZE)
    assert ArenaOwner(arena).audit()["slabs"] == 1
    assert not ArenaOwner(arena).audit()
    assert (arena.tables.slab_block_bytes == sizes).all()
    assert (arena.tables.slab_check == check).all()
    assert fetch(arena, KEYS, before.leases[0], block_bytes=SIZE)
    check_invariants(arena.tables)


def test_a_size_that_is_wrong_twice_is_no_promise_and_nobody_is_given_its_bytes(
    arena: Arena,
) -> None:
    store(arena, KEYS[:3], block_bytes=SIZE)
    slabs.serve(arena.tables, np.flatnonzero(arena.tables.slab_block_bytes), SIZE + 8)
    arena.tables.undo.settle()
    held = arena.lease_for(KEYS, WANTED)
    assert held is not None
    assert (held.num_blocks, held.leases) == (0, ())
    assert arena.lease(KEYS, block_bytes=SIZE) == []


def test_a_write_goes_on_beside_a_flipped_bit_of_its_slabs_size(arena: Arena) -> None:
    made = reserved(arena, KEYS[:3], block_bytes=SIZE)
    arena.tables.slab_block_bytes[arena.tables.geometry.slab_of(made.slots[0])] ^= np.uint64(8)
    pool = pool_of(KEYS[:3], block_bytes=SIZE)
    assert arena.commit(made, arena.write(made, pool, np.arange(3)))
    ArenaOwner(arena).audit()
    held = leased(arena, KEYS, block_bytes=SIZE)
    assert fetch(arena, KEYS, held, block_bytes=SIZE)
    assert held.num_slots == 3


def test_rebuild_of_sound_tables_changes_no_block(tables: Tables) -> None:
    keys = chain(20)
    put(tables, keys)
    take(tables, keys[:7])
    reserve(tables, chain(3, seed="pending"), parent=keys[4], depth=5)
    assert repair.rebuild(tables, now=NOW) == 0
    check_invariants(tables)
    assert matched(tables, keys) == 20
    assert not tables.undo.is_open


def test_rebuild_tells_the_announcer_that_anything_may_have_changed(tables: Tables) -> None:
    put(tables, chain(3))
    reader = EventReader()
    reader.take(tables)
    repair.rebuild(tables, now=NOW)
    assert reader.take(tables).tolist() == list(range(tables.geometry.num_slots))


def test_of_two_slots_with_one_key_the_older_stays(tables: Tables) -> None:
    keys = chain(2)
    first, second = put(tables, keys), put(tables, chain(2, seed="x"))
    tables.slot_key[second.slots] = tables.slot_key[first.slots]
    assert repair.rebuild(tables, now=NOW) == 2
    assert find(tables, keys) == first.slots.tolist()
    check_invariants(tables)


def test_what_is_leased_or_being_written_is_not_freed_when_it_is_given_up(tables: Tables) -> None:
    keys, copies = chain(2), chain(2, seed="x")
    put(tables, keys)
    leased = put(tables, copies)
    held = take(tables, copies)
    written: Reservation = reserve(tables, chain(2, seed="y"))
    for late in (leased, written):
        tables.slot_key[late.slots] = tables.slot_key[find(tables, keys)]
    assert repair.rebuild(tables, now=NOW) == 4
    assert set(tables.slot_state[leased.slots].tolist()) == {QUARANTINED}
    assert set(tables.slot_state[written.slots].tolist()) == {LIMBO}
    assert lease.leased_slots(tables, held) is not None
    check_invariants(tables)


def test_garbage_in_everything_that_is_derived_is_replaced(tables: Tables) -> None:
    keys = chain(20)
    made = put(tables, keys)
    held = take(tables, keys[:3], holder=4)
    noise = np.random.default_rng(0)
    tables.index_slot[:] = noise.integers(0, 2**32, tables.index_slot.shape, dtype=np.uint32)
    tables.index_tag[:] = noise.integers(0, 2**32, tables.index_tag.shape, dtype=np.uint32)
    tables.slot_children[:] = noise.integers(-9, 9, 64)
    tables.slot_leases[:] = noise.integers(-9, 9, 64)
    tables.slot_parent[5:] = noise.integers(-(2**31), 2**31, 59)
    tables.slot_holder[:] = noise.integers(0, 8, 64)
    free_pages = np.flatnonzero(tables.page_holder == 0)
    tables.page_slots[free_pages] = 2**32 - 1
    tables.page_count[free_pages] = PAGE_SLOTS * 7
    tables.slab_block_bytes[5:] = 3 * SLOT
    repair.rebuild(tables, now=NOW)
    check_invariants(tables)
    assert matched(tables, keys) == 20
    assert slots_named(tables, held) == made.slots[:3].tolist()


def test_page_with_garbage_is_dropped_without_touching_other_leases(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys)
    good, bad = take(tables, keys), take(tables, keys)
    tables.page_count[bad.page] = 2**32 - 1
    tables.page_slots[bad.page] = 2**32 - 1
    repair.rebuild(tables, now=NOW)
    check_invariants(tables)
    assert lease.leased_slots(tables, bad) is None
    assert isinstance(good, Lease)
    assert lease.leased_slots(tables, good) is not None


def test_death_in_a_rebuild_leaves_as_much_to_the_next() -> None:
    scene = Scene(crowded=True)
    OPERATIONS["reserve"](scene.tables, scene)
    log = record(scene.tables, lambda tables: repair.rebuild(tables, now=NOW))
    replay = Replay(scene.tables, log)
    for died_at in range(0, len(log), 7):
        left = replay.after(died_at)
        assert not died_at or not left.undo.roll_back(), "it is not torn"
        assert repair.rebuild(left, now=NOW) == 0
        check_invariants(left)
        assert slots_named(left, scene.held) == slots_named(scene.tables, scene.held)
        assert (left.slot_state == scene.tables.slot_state).all()
