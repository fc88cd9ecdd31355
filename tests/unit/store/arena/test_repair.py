"""Steps that are undone or torn, and what is wrong in the tables is found and mended."""

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner, Held, PartRequest
from kvray.store.arena import audit, slabs, slots
from kvray.store.arena.layout import FREE, LIMBO, PAGE_SLOTS, QUARANTINED, READY
from kvray.store.arena.tables import EventReader, Tables
from kvray.store.scan import scan
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    fetch,
    find,
    leased,
    leased_for,
    make_tables,
    matched,
    num_here,
    overwrite,
    pool_of,
    put,
    reserve,
    reserved,
    served,
    slots_named,
    store,
    take,
)
from tests.unit.store.write_log import Replay, copy_of, record

NOW = 1000.0


def test_step_that_is_too_large_is_torn_and_needs_a_rebuild(tables):
    row = np.array([1])
    for _ in range(len(tables.undo_entry) + 1):
        tables.put(row, slot_leases=7)
    assert not copy_of(tables).undo.roll_back()
    tables.undo.settle()
    assert not tables.undo.is_open
    tables.put(row, slot_leases=8)
    assert tables.undo.roll_back(), "the next step is undone as ever"
    assert audit.rebuild(tables, now=NOW) == 0
    assert not tables.slot_leases.any()


def test_step_after_a_torn_one_that_somebody_else_mended_is_noted(tables):
    row = np.array([1])
    tables.put(row, slot_leases=7)
    tables.undo.tear()
    assert not tables.undo.roll_back()
    audit.rebuild(Tables(tables.data.base, tables.geometry), now=NOW)
    tables.put(row, slot_leases=8)
    assert Tables(tables.data.base, tables.geometry).undo.roll_back()
    assert not tables.slot_leases.any()


def test_step_over_all_slots_at_once_can_be_undone(tables):
    put(tables, chain(tables.geometry.num_slots))
    tables.undo.settle()
    before = copy_of(tables)
    slots.free(tables, np.arange(tables.geometry.num_slots))
    assert tables.undo.roll_back()
    assert all((tables.columns[name] == column).all() for name, column in before.columns.items())


@pytest.mark.parametrize(
    ("record", "value"),
    [
        *(
            ("undo_entry", entry)
            for entry in ((99, 1, 0, 2), (1, 2**31, 0, 2), (1, 4, 2**31, 2), (1, 9, 4, 4))
        ),
        ("undo_log", 2**32 - 1),  # a row outside of its column
    ],
)
def test_senseless_records_are_left_alone(record, value):
    tables = make_tables()
    tables.put(np.array([1]), slot_state=READY)
    getattr(tables, record)[0] = value
    assert not copy_of(tables).undo.roll_back()
    assert tables.slot_state[1] == READY


# -- what is wrong is found, said and mended; a step under way is not wrong -----------------------

KEYS = chain(6)


def found(arena: Arena) -> set[str]:
    tables = arena.tables
    return {name for share in audit.shares(tables) for name in audit.find(tables, share)}


@pytest.fixture
def stored(arena: Arena) -> Arena:
    store(arena, KEYS)
    store(arena, KEYS, part=1)
    assert arena.lease(KEYS)
    assert not found(arena)
    return arena


def first_ready(tables: Tables) -> int:
    return int(np.flatnonzero(tables.slot_state == READY)[1])


@pytest.mark.parametrize(
    ("name", "column", "at", "value"),
    [
        ("slabs", "slab_block_bytes", 7, 2**40),
        ("states", "slot_state", None, 66),
        ("parents", "slot_parent", None, 2**30),
        ("children", "slot_children", None, 5),
        ("index", "slot_part", None, 3),
        ("entries", "index_slot", 5, 2**31),
        ("leases", "slot_leases", None, 0),
        ("records", "page_next", 0, 2**20),
    ],
)
def test_damage_is_found_by_its_name_and_mended_by_the_owner(stored, name, column, at, value):
    where = first_ready(stored.tables) if at is None else at
    getattr(stored.tables, column).reshape(-1)[where] = value
    assert name in found(stored)
    owner = ArenaOwner(stored)
    assert name in owner.audit()
    assert not owner.audit()
    assert stored.stats()["repairs"] == 1


def test_a_step_that_only_seems_begun_does_not_keep_engines_out(stored):
    stored.tables.header["undo_count"] = 2**40
    assert stored.lease(KEYS) is None
    ArenaOwner(stored).audit()
    assert num_here(stored, KEYS) == 6


def test_what_is_repaired_still_has_its_blocks_and_its_leases(stored):
    held = leased(stored, KEYS)
    stored.tables.slot_parent[first_ready(stored.tables)] = 2**30
    assert ArenaOwner(stored).audit() == {"parents": 1, "children": 1}
    assert fetch(stored, KEYS, held)
    assert stored.release(held)
    assert leased_for(stored, KEYS, [[PartRequest(0), PartRequest(1)]]).num_blocks == 6


@pytest.mark.parametrize("seed", range(3))
def test_tables_that_are_overwritten_as_a_whole_are_mended(stored, seed):
    overwrite(stored.tables, seed)
    figures = stored.stats()
    assert figures["resident_bytes"] <= figures["capacity_bytes"]
    assert set(scan(stored, lambda done, total: None).damage) >= {"slabs", "states", "children"}
    owner = ArenaOwner(stored)
    assert owner.audit()
    assert not owner.audit()
    check_invariants(stored.tables)
    owner.bury_dead(limbo_s=0.0)
    owner.evict_ahead(1.0)
    stored.leave()  # its place is overwritten, too
    stored.join("again")
    store(stored, chain(3, seed="after"))
    assert served(stored, chain(3, seed="after")) == 3


def test_a_slot_that_comes_to_claim_another_block_is_not_committed(arena):
    made = reserved(arena, KEYS)
    arena.tables.slot_part[made.slots[2]] ^= 1
    assert arena.commit(made, arena.write(made, pool_of(KEYS), np.arange(6)))
    assert num_here(arena, KEYS) == 2
    assert not arena.present(KEYS, [1])[0].any()
    assert arena.tables.slot_state[made.slots[2]] == FREE
    ArenaOwner(arena).audit()


def test_entries_of_the_index_that_name_no_slot_are_misses(stored):
    entries = stored.tables.columns["index_slot"]
    entries[entries > 0] += np.uint32(2**31)
    assert not stored.present(KEYS, [0])[0].any()
    assert stored.lease(KEYS) == stored.lease(KEYS[:1]) == []
    assert ArenaOwner(stored).audit()
    assert num_here(stored, KEYS) == 6


SIZE = 3000  # rounded up to a slot, so many other sizes have as many slots
WANTED = [[PartRequest(0, None, SIZE)]]


@pytest.mark.parametrize("column", ["slab_block_bytes", "slab_check"])
def test_a_flipped_bit_of_a_size_costs_nobody_a_block(arena, column):
    store(arena, KEYS[:3], block_bytes=SIZE)
    sizes, check = arena.tables.slab_block_bytes.copy(), arena.tables.slab_check.copy()
    for bit in range(64):
        before = leased_for(arena, KEYS, WANTED)
        slab = arena.tables.geometry.slab_of(int(before.slots[0][0]))
        getattr(arena.tables, column)[slab] ^= np.uint64(1 << bit)
        assert "slabs" in found(arena)
        between = leased_for(arena, KEYS, WANTED)
        for held in (before, between):
            assert fetch(arena, KEYS, held.leases[0], block_bytes=SIZE)
        assert ArenaOwner(arena).audit()["slabs"] == 1
        assert not ArenaOwner(arena).audit()
        assert (arena.tables.slab_block_bytes == sizes).all()
        assert (arena.tables.slab_check == check).all()
        assert fetch(arena, KEYS, before.leases[0], block_bytes=SIZE)
        assert arena.release(*before.leases, *between.leases)


def test_nobody_is_given_the_bytes_of_a_size_that_is_wrong_twice(arena):
    store(arena, KEYS[:3], block_bytes=SIZE)
    slabs.serve(arena.tables, np.flatnonzero(arena.tables.slab_block_bytes), SIZE + 8)
    arena.tables.undo.settle()
    assert leased_for(arena, KEYS, WANTED) == Held(num_blocks=0, leases=())
    assert arena.lease(KEYS, block_bytes=SIZE) == []


def test_a_write_goes_on_beside_a_flipped_bit_of_its_slabs_size(arena):
    made = reserved(arena, KEYS[:3], block_bytes=SIZE)
    arena.tables.slab_block_bytes[arena.tables.geometry.slab_of(made.slots[0])] ^= np.uint64(8)
    pool = pool_of(KEYS[:3], block_bytes=SIZE)
    assert arena.commit(made, arena.write(made, pool, np.arange(3)))
    ArenaOwner(arena).audit()
    assert served(arena, KEYS[:3], block_bytes=SIZE) == 3


def test_a_slab_that_only_looks_spare_is_given_to_no_other_size(arena):
    store(arena, KEYS[:1], block_bytes=4 * SLOT)
    held = leased(arena, KEYS)
    arena.tables.slab_block_bytes[0] ^= np.uint64(4 * SLOT)  # leaves 0
    store(arena, chain(7, seed="x"))
    assert fetch(arena, KEYS, held, block_bytes=4 * SLOT)
    ArenaOwner(arena).audit()


def test_a_slab_whose_size_only_looks_right_is_given_to_no_other_size(arena):
    store(arena, KEYS[:1], block_bytes=4 * SLOT)
    held = leased(arena, KEYS)
    arena.tables.slab_block_bytes[0] ^= np.uint64(SLOT)
    store(arena, chain(1, seed="x"), block_bytes=5 * SLOT)
    assert fetch(arena, KEYS, held, block_bytes=4 * SLOT)
    ArenaOwner(arena).audit()


def test_a_damaged_count_gives_no_slot_away(arena):
    store(arena, chain(8))
    held = leased(arena, chain(8))
    arena.tables.slab_free[0] ^= 8
    store(arena, chain(8, seed="x"))
    assert fetch(arena, chain(8), held)
    ArenaOwner(arena).audit()


@pytest.mark.parametrize(("column", "value"), [("slot_holder", 0), ("slot_state", 33)])
def test_a_slot_that_has_lost_its_writer_is_given_to_nobody_at_once(arena, column, value):
    made = reserved(arena, KEYS)
    getattr(arena.tables, column)[made.slots[2]] = value
    assert "states" in ArenaOwner(arena).audit()
    assert arena.tables.slot_state[made.slots[2]] == LIMBO


def test_of_slots_with_one_key_the_oldest_stays_and_only_idle_ones_are_freed(tables):
    keys, copies = chain(2), chain(2, seed="x")
    oldest = put(tables, keys)
    leased, idle = put(tables, copies), put(tables, chain(2, seed="z"))
    held = take(tables, copies)
    written = reserve(tables, chain(2, seed="y"))
    for late in (leased, idle, written):
        tables.slot_key[late.slots] = tables.slot_key[oldest.slots]
    assert audit.rebuild(tables, now=NOW) == 6
    assert find(tables, keys) == oldest.slots.tolist()
    for late, state in ((leased, QUARANTINED), (idle, FREE), (written, LIMBO)):
        assert set(tables.slot_state[late.slots].tolist()) == {state}
    assert slots_named(tables, held)


def test_garbage_in_everything_that_is_derived_is_replaced_and_announced(tables):
    keys = chain(20)
    made = put(tables, keys)
    held = take(tables, keys[:3], holder=4)
    noise = np.random.default_rng(0)
    for column in (tables.index_slot, tables.index_tag):
        column[:] = noise.integers(0, 2**32, column.shape, dtype=np.uint32)
    for column in (tables.slot_children, tables.slot_leases):
        column[:] = noise.integers(-9, 9, 64)
    tables.slot_parent[5:] = noise.integers(-(2**31), 2**31, 59)
    tables.slot_holder[:] = noise.integers(0, 8, 64)
    free_pages = np.flatnonzero(tables.page_holder == 0)
    tables.page_slots[free_pages] = 2**32 - 1
    tables.page_count[free_pages] = PAGE_SLOTS * 7
    tables.slab_block_bytes[5:] = 3 * SLOT
    reader = EventReader()
    reader.take(tables)
    audit.rebuild(tables, now=NOW)
    assert reader.take(tables).tolist() == list(range(64)), "anything may have changed"
    assert matched(tables, keys) == 20
    assert slots_named(tables, held) == made.slots[:3].tolist()


def test_death_in_a_rebuild_leaves_as_much_to_the_next(tables):
    put(tables, KEYS)
    held = take(tables, KEYS)
    reserve(tables, chain(9, seed="new"), parent=KEYS[2], depth=3)
    log = record(tables, lambda tables: audit.rebuild(tables, now=NOW))
    replay = Replay(tables, log)
    for died_at in range(0, len(log), 7):
        left = replay.after(died_at)
        assert not died_at or not left.undo.roll_back(), "it is not torn"
        assert audit.rebuild(left, now=NOW) == 0
        assert not left.undo.is_open
        check_invariants(left)
        assert slots_named(left, held) == slots_named(tables, held)
        assert (left.slot_state == tables.slot_state).all()
