"""The ring of events: nothing that happens is missed, and a look costs what has happened."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.store.arena import slots
from kvray.store.arena import tables as tables_module
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import EventReader, Tables
from tests.unit.store.small_arena import chain, evict, make_tables, num_here, put, reserved, store

KEYS = chain(10)


def seen_all(tables: Tables) -> EventReader:
    """Return a reader that has looked at all slots."""
    reader = EventReader()
    while reader.has_more(tables):
        reader.take(tables)
    return reader


def test_a_use_is_an_event_and_neither_a_look_nor_a_block_that_is_not_there_yet(arena):
    made = store(arena, KEYS)
    reader = seen_all(arena.tables)
    assert num_here(arena, KEYS) == len(KEYS)
    assert arena.abort(reserved(arena, chain(2, seed="x")))
    assert not reader.has_more(arena.tables)
    arena.lease(KEYS[:3])
    assert reader.take(arena.tables).tolist() == sorted(made.slots[:3].tolist())
    assert len(reader.take(arena.tables)) == 0


def test_a_step_that_is_undone_costs_a_look_in_vain(tables):
    made = put(tables, chain(4))
    tables.undo.settle()
    reader = seen_all(tables)
    slots.free(tables, made.slots)
    tables.undo.roll_back()
    assert reader.take(tables).tolist() == sorted(made.slots.tolist())
    assert (tables.slot_state[made.slots] == READY).all()


def test_a_damaged_ring_names_no_slot_that_is_not_there(tables):
    reader = seen_all(tables)
    put(tables, chain(2))
    tables.event_slot[:] = 2**32 - 1
    assert len(reader.take(tables)) == 0
    tables.counts.events = 1  # it cannot have gone back
    assert len(reader.take(tables)) == tables.geometry.num_slots


@given(
    steps=st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), max_size=30),
    rows=st.integers(1, 40),
    piece=st.integers(1, 100),
)
@settings(deadline=None)
def test_a_reader_always_ends_with_what_is_there(steps, rows, piece):
    tables = make_tables()
    tables.event_slot = tables.event_slot[:rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables_module, "_PIECE", piece)
        reader, known = EventReader(), np.zeros(tables.geometry.num_slots, dtype=bool)

        def look() -> None:
            found = reader.take(tables)
            assert len(found) <= piece + rows, "a look goes through a piece, and what happened"
            known[found] = tables.slot_state[found] == READY

        for number, (count, is_store, looks) in enumerate(steps):
            if is_store:
                put(tables, chain(count, seed=str(number)))
            else:
                evict(tables, count)
            if looks:
                look()
        while reader.has_more(tables):
            look()
        assert (known == (tables.slot_state == READY)).all()
