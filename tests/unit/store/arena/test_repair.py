"""A rebuild leaves sound tables, whatever it finds."""

import numpy as np

from kvray.store.arena import lease, repair
from kvray.store.arena.events import EventReader
from kvray.store.arena.layout import LIMBO, PAGE_SLOTS, QUARANTINED
from kvray.store.arena.lease import Lease
from kvray.store.arena.slots import Reservation
from kvray.store.arena.tables import Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.scene import NOW, OPERATIONS, Scene, slots_named
from tests.unit.store.small_arena import SLOT, chain, find, matched, put, reserve, take
from tests.unit.store.write_log import Replay, record


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
