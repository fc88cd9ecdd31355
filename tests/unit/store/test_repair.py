"""After a death between any two stores of any operation, a rebuild leaves sound tables."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.store import lease, repair, slabs, slots
from kvray.store.layout import LIMBO, PAGE_SLOTS, QUARANTINED, READY, RESERVED
from kvray.store.lease import Lease
from kvray.store.slots import Reservation
from kvray.store.tables import Array, Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    commit,
    evict,
    find,
    make_tables,
    matched,
    put,
    reserve,
    take,
)
from tests.unit.store.write_log import Write, record, replay

NOW = 1000.0
DYING, LIVING = 1, 2
"""Holders: the one that dies inside of its operation, and one whose things must not be touched."""

TRUNK, LEFT, RIGHT = chain(6, seed="trunk"), chain(9, seed="left"), chain(5, seed="right")
LARGE, PENDING, THEIRS = chain(3, seed="large"), chain(4, seed="mine"), chain(3, seed="theirs")


class Scene:
    """A lived-in arena: forks, leases, two block sizes, writers at work, a block in quarantine."""

    def __init__(self, *, crowded: bool) -> None:
        tables = self.tables = make_tables(num_slabs=6)
        put(tables, TRUNK)
        put(tables, LEFT, parent=TRUNK[-1], depth=6)
        put(tables, RIGHT, parent=TRUNK[2], depth=3)
        put(tables, LARGE, block_bytes=2 * SLOT)
        self.pending = reserve(tables, PENDING, parent=RIGHT[-1], depth=8, holder=DYING)
        self.theirs = reserve(tables, THEIRS, parent=TRUNK[0], depth=1, holder=LIVING)
        self.mine = take(tables, TRUNK + LEFT[:2], holder=DYING)
        self.held = take(tables, TRUNK[:3] + RIGHT[:2], holder=LIVING)
        slots.quarantine(tables, np.array(find(tables, RIGHT[:1])))
        reserve(tables, chain(2, seed="dead"), holder=5)
        slots.strand(tables, 5, now=NOW - 1)
        slots.quarantine(tables, np.array(find(tables, LEFT[8:])))
        if crowded:
            free = len(slabs.free_slots(tables, SLOT)) + 8 * int((~has_size(tables)).sum())
            put(tables, chain(free, seed="filler"))
            assert not len(slabs.free_slots(tables, SLOT))
            assert has_size(tables).all()
        check_invariants(tables)


def has_size(tables: Tables) -> Array:
    return tables.slab_block_bytes > 0


def leave(tables: Tables, holder: int) -> None:
    slots.abort_holder(tables, holder)
    lease.release_holder(tables, holder)


def slots_named(tables: Tables, held: Lease) -> list[int]:
    found = lease.leased_slots(tables, held)
    assert found is not None, "a lease was broken"
    return list(found.tolist())


Operation = Callable[[Tables, Scene], object]

OPERATIONS: dict[str, Operation] = {
    "reserve": lambda tables, scene: reserve(tables, chain(9, seed="new"), holder=DYING),
    "reserve below": lambda tables, scene: reserve(
        tables, chain(5, seed="new"), parent=TRUNK[-1], depth=6, holder=DYING
    ),
    "reserve what orphans need": lambda tables, scene: reserve(
        tables, TRUNK[:3] + RIGHT, holder=DYING
    ),
    "reserve another size": lambda tables, scene: reserve(
        tables, chain(7, seed="new"), block_bytes=4 * SLOT, holder=DYING
    ),
    "commit": lambda tables, scene: commit(tables, scene.pending, holder=DYING),
    "abort": lambda tables, scene: slots.abort(tables, scene.pending, holder=DYING),
    "leave": lambda tables, scene: leave(tables, DYING),
    "evict": lambda tables, scene: evict(tables, 9),
    "lease": lambda tables, scene: take(tables, TRUNK + LEFT[:4], holder=DYING),
    "release": lambda tables, scene: lease.release(tables, scene.mine),
    "quarantine": lambda tables, scene: slots.quarantine(
        tables, np.array(find(tables, TRUNK[2:4] + LEFT[1:2]))
    ),
    "bury": lambda tables, scene: (
        lease.release_holder(tables, DYING),
        slots.strand(tables, DYING, now=NOW),
    ),
    "reclaim": lambda tables, scene: slots.reclaim(tables, before=NOW),
}


def die(tables: Tables, log: list[Write]) -> Tables:
    """Return what a process leaves that made the stores of `log` in a section, and died."""
    left = replay(tables, log)
    left.header["section"] = 1
    return left


def check_after(scene: Scene, left: Tables, done: Tables) -> None:
    """Rebuild what a death left, and fail if anything is wrong or a living holder has lost.

    `done` is what the operation would have left.
    """
    repair.rebuild(left, now=NOW)
    left.header["section"] = 0
    check_invariants(left)
    before = scene.tables
    ready = np.flatnonzero(left.slot_state == READY)
    # The tests commit the first word of its key as a block's checksum.
    assert (left.slot_checksum[ready] == left.slot_key[ready, 0]).all(), "an unwritten block"
    check_kept(before, left, done)
    assert slots_named(left, scene.held) == slots_named(before, scene.held)
    assert commit(left, scene.theirs, holder=LIVING) == len(THEIRS)
    lease.release_holder(left, DYING)
    slots.strand(left, DYING, now=NOW)
    slots.reclaim(left, before=NOW)
    assert not (left.slot_state == RESERVED).any(), "a slot is lost"
    assert not (left.slot_state == LIMBO).any()
    check_invariants(left)
    check_still_works(left)


def check_kept(before: Tables, left: Tables, done: Tables) -> None:
    """Fail if a block is lost, or its parent link, that the operation would not have touched."""
    same = (before.slot_state == READY) & (done.slot_state == READY)
    same &= (before.slot_key == done.slot_key).all(axis=1)
    assert (left.slot_state[same] == READY).all()
    assert (left.slot_key[same] == before.slot_key[same]).all()
    linked = same & (before.slot_parent == done.slot_parent)
    assert (left.slot_parent[linked] == before.slot_parent[linked]).all()


def check_still_works(left: Tables) -> None:
    put(left, chain(12, seed="afterwards"))
    assert matched(left, chain(12, seed="afterwards")) == 12
    check_invariants(left)


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_death_after_any_store_is_repaired(name: str, crowded: bool) -> None:
    scene = Scene(crowded=crowded)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    assert log
    # A lease fills whole pages with slots one by one: not every one of those is another case.
    boring = [at for at, (table, *_) in enumerate(log) if table == "page_slots"][20:]
    done = replay(scene.tables, log)
    for died_at in sorted({*range(len(log) + 1)} - {*boring}):
        check_after(scene, die(scene.tables, log[:died_at]), done)


@pytest.mark.parametrize("name", OPERATIONS)
def test_log_of_stores_is_complete(name: str) -> None:
    scene = Scene(crowded=True)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    replayed = replay(scene.tables, log)
    OPERATIONS[name](scene.tables, scene)
    assert replayed.header == scene.tables.header
    for table, _, _ in scene.tables.geometry.tables():
        assert np.array_equal(getattr(replayed, table), getattr(scene.tables, table)), table


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(OPERATIONS)), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_death_during_a_rebuild_is_repaired_by_the_next(
    name: str, first: float, second: float, crowded: bool
) -> None:
    scene = Scene(crowded=crowded)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    left = die(scene.tables, log[: round(first * len(log))])
    rebuilding = record(left, lambda tables: repair.rebuild(tables, now=NOW))
    left = die(left, rebuilding[: round(second * len(rebuilding))])
    check_after(scene, left, replay(scene.tables, log))


def test_rebuild_of_sound_tables_changes_no_block(tables: Tables) -> None:
    keys = chain(20)
    put(tables, keys)
    take(tables, keys[:7])
    reserve(tables, chain(3, seed="pending"), parent=keys[4], depth=5)
    assert repair.rebuild(tables, now=NOW) == 0
    check_invariants(tables)
    assert matched(tables, keys) == 20
    assert int(tables.header["repairs"]) == 1


def test_rebuild_tells_the_announcer_that_anything_may_have_changed(tables: Tables) -> None:
    put(tables, chain(3))
    seen = tables.slot_version.copy()
    repair.rebuild(tables, now=NOW)
    assert (tables.slot_version != seen).all()


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
