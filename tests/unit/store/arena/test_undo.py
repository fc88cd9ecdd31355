"""After a death between any two stores of any operation, all of a step is there or nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.store.arena import lease, repair, slots
from kvray.store.arena.layout import LIMBO, READY, RESERVED, UNDO_ENTRIES
from kvray.store.arena.tables import Tables
from tests.examples import examples, places
from tests.unit.store.invariants import check_invariants
from tests.unit.store.scene import DYING, NOW, OPERATIONS, THEIRS, Scene, slots_named
from tests.unit.store.small_arena import chain, commit, matched, put
from tests.unit.store.write_log import Replay, copy_of, image, record


def check_after(scene: Scene, left: Tables, done: Tables) -> None:
    """Undo what a death left half done, and fail if anything is wrong or lost.

    `done` is what the operation would have left.
    """
    assert left.undo.roll_back()
    check_invariants(left)
    before = scene.tables
    ready = np.flatnonzero(left.slot_state == READY)
    # The tests commit the first word of its key as a block's checksum.
    assert (left.slot_checksum[ready] == left.slot_key[ready, 0]).all(), "an unwritten block"
    check_kept(before, left, done)
    assert slots_named(left, scene.held) == slots_named(before, scene.held)
    assert commit(left, scene.theirs) == len(THEIRS)
    lease.release_holder(left, DYING)
    slots.strand(left, DYING, now=NOW)
    slots.reclaim(left, before=NOW)
    assert not (left.slot_state == RESERVED).any(), "a slot is lost"
    assert not (left.slot_state == LIMBO).any()
    put(left, chain(12, seed="afterwards"))
    assert matched(left, chain(12, seed="afterwards")) == 12
    check_invariants(left)


def check_kept(before: Tables, left: Tables, done: Tables) -> None:
    """Fail if a block is lost, or its parent link, that the operation would not have touched."""
    same = (before.slot_state == READY) & (done.slot_state == READY)
    same &= (before.slot_key == done.slot_key).all(axis=1)
    assert (left.slot_state[same] == READY).all()
    assert (left.slot_key[same] == before.slot_key[same]).all()
    linked = same & (before.slot_parent == done.slot_parent)
    assert (left.slot_parent[linked] == before.slot_parent[linked]).all()


def columns_equal(one: Tables, other: Tables) -> bool:
    """Whether all that is undone is equal, but for what a FREE slot or an empty entry says."""
    in_use, entered = one.slot_state > 0, one.index_slot > 0
    return (
        all(
            np.array_equal(column, other.columns[name])
            for name, column in one.columns.items()
            if name not in ("slot_parent", "index_tag")
        )
        and np.array_equal(one.slot_parent[in_use], other.slot_parent[in_use])
        and np.array_equal(one.index_tag[entered], other.index_tag[entered])
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_death_before_any_store_is_undone(name: str, crowded: bool) -> None:
    scene = Scene(crowded=crowded)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    assert log
    done, replay = Replay(scene.tables, log).after(len(log)), Replay(scene.tables, log)
    for died_at in places(len(log) + 1):
        check_after(scene, replay.after(died_at), done)


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_undoing_ends_where_a_step_ended(name: str, crowded: bool) -> None:
    """The tables are what they were before the operation, or after one of its settled steps."""
    scene = Scene(crowded=crowded)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    replay = Replay(scene.tables, log)
    settled = scene.tables
    for died_at in range(len(log) + 1):
        left = replay.after(died_at)
        if left.undo.is_open:
            left.undo.roll_back()
            assert columns_equal(left, settled)
        else:
            settled = left


@pytest.mark.parametrize("name", OPERATIONS)
def test_log_of_stores_is_complete(name: str) -> None:
    scene = Scene(crowded=True)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    replayed = Replay(scene.tables, log).after(len(log))
    OPERATIONS[name](scene.tables, scene)
    assert image(replayed) == image(scene.tables)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(OPERATIONS)), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_death_while_undoing_is_undone_by_the_next(
    name: str, first: float, second: float, crowded: bool
) -> None:
    scene = Scene(crowded=crowded)
    log = record(scene.tables, lambda tables: OPERATIONS[name](tables, scene))
    left = Replay(scene.tables, log).after(round(first * len(log)))
    undoing = record(left, lambda tables: tables.undo.roll_back())
    left = Replay(left, undoing).after(round(second * len(undoing)))
    check_after(scene, left, Replay(scene.tables, log).after(len(log)))


def test_what_was_settled_stands(tables: Tables) -> None:
    tables.put(np.array([3, 5]), slot_state=READY)
    tables.undo.settle()
    tables.put(np.array([3]), slot_state=LIMBO)
    assert tables.undo.roll_back()
    assert tables.slot_state[[3, 5]].tolist() == [READY, READY]


def test_row_that_occurs_twice_is_put_back_to_what_it_was_first(tables: Tables) -> None:
    tables.add(np.array([4, 4, 6]), slot_children=1)
    tables.put(np.array([4]), slot_children=9)
    assert tables.undo.roll_back()
    assert not tables.slot_children.any()


def test_step_that_is_too_large_is_torn_and_needs_a_rebuild(tables: Tables) -> None:
    row = np.array([1])
    for _ in range(UNDO_ENTRIES + 1):
        tables.put(row, slot_leases=7)
    assert not copy_of(tables).undo.roll_back()
    tables.undo.settle()
    assert not tables.undo.is_open
    tables.put(row, slot_leases=8)
    assert tables.undo.roll_back(), "the next step is undone as ever"
    assert repair.rebuild(tables, now=NOW) == 0
    assert not tables.slot_leases.any()


def test_step_after_a_torn_one_that_somebody_else_mended_is_noted(tables: Tables) -> None:
    row = np.array([1])
    tables.put(row, slot_leases=7)
    tables.undo.tear()
    assert not tables.undo.roll_back()
    owner = Tables(tables.data.base, tables.geometry)
    repair.rebuild(owner, now=NOW)
    tables.put(row, slot_leases=8)
    assert Tables(tables.data.base, tables.geometry).undo.roll_back()
    assert not tables.slot_leases.any()


def test_step_over_all_slots_at_once_can_be_undone() -> None:
    tables = Scene(crowded=True).tables
    before = copy_of(tables)
    slots.free(tables, np.arange(tables.geometry.num_slots))
    assert tables.undo.roll_back()
    assert columns_equal(before, tables)


@pytest.mark.parametrize("entry", [(99, 1, 0, 2), (1, 2**31, 0, 2), (1, 4, 2**31, 2), (1, 9, 4, 4)])
def test_record_that_makes_no_sense_is_not_followed(
    tables: Tables, entry: tuple[int, int, int, int]
) -> None:
    tables.put(np.array([1]), slot_state=READY)
    tables.undo_entry[0] = entry
    assert not copy_of(tables).undo.roll_back()
    assert tables.slot_state[1] == READY


def test_row_outside_of_its_column_is_not_followed(tables: Tables) -> None:
    tables.put(np.array([1]), slot_state=READY)
    tables.undo_log[0] = 2**32 - 1
    assert not tables.undo.roll_back()
