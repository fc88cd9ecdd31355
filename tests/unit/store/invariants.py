"""What holds of an arena's tables between any two steps."""

import numpy as np

from kvray.identity.block import BlockKey
from kvray.store.arena import key_index, lease, payload
from kvray.store.arena.layout import FREE, LIMBO, PAGE_SLOTS, QUARANTINED, READY, RESERVED
from kvray.store.arena.payload import slot_bytes
from kvray.store.arena.tables import Tables
from tests.unit.store.small_arena import content


def check_invariants(tables: Tables) -> None:
    """Fail if the tables contradict each other."""
    _check_states(tables)
    _check_index(tables)
    _check_families(tables)
    _check_leases(tables)
    _check_slabs(tables)


def check_contents(tables: Tables) -> None:
    """Fail if a READY slot holds anything but the content of its key, and that one's checksum."""
    for slot in np.flatnonzero(tables.slot_state == READY).tolist():
        size = int(tables.slab_block_bytes[tables.geometry.slab_of(slot)])
        key = BlockKey(tables.slot_key[slot].tobytes())
        expected = content(key, int(tables.slot_part[slot]), block_bytes=size)
        assert (slot_bytes(tables, slot)[:size] == expected).all(), "another block's bytes"
        assert payload.verify(tables, np.array([slot])).all(), "another checksum"


def _check_states(tables: Tables) -> None:
    state = tables.slot_state
    assert (state[tables.num_backed :] == FREE).all(), "a slot without memory is in use"
    assert np.isin(state, (FREE, RESERVED, READY, LIMBO, QUARANTINED)).all()
    assert (tables.slot_holder[state == RESERVED] > 0).all(), "a RESERVED slot has no writer"
    assert (tables.slot_holder <= tables.geometry.holders_max).all()


def _check_index(tables: Tables) -> None:
    named = tables.index_slot[tables.index_slot > 0].astype(np.int64) - 1
    used = _used(tables)
    assert sorted(named.tolist()) == used.tolist(), "index and slots are not one to one"
    for part in np.unique(tables.slot_part[used]):
        of_part = used[tables.slot_part[used] == part]
        found = key_index.find(tables, tables.slot_key[of_part], int(part))
        assert (found == of_part).all(), "a slot is not found under its own key"


def _check_families(tables: Tables) -> None:
    used = _used(tables)
    parents = tables.slot_parent[used].astype(np.int64)
    linked, parents = used[parents >= 0], parents[parents >= 0]
    assert np.isin(parents, used).all(), "a parent went before its child"
    assert (tables.slot_depth[parents] + 1 == tables.slot_depth[linked]).all()
    assert (tables.slot_part[parents] == tables.slot_part[linked]).all()
    counted = np.bincount(parents, minlength=tables.geometry.num_slots)
    assert (tables.slot_children == counted).all(), "child counts differ from parent links"


def _check_leases(tables: Tables) -> None:
    held = tables.page_holder > 0
    assert (tables.page_count[held] <= PAGE_SLOTS).all()
    assert (tables.page_holder <= tables.geometry.holders_max).all()
    counts = lease.count_leases(tables)
    assert (tables.slot_leases[tables.backed] == counts).all(), "lease counts differ"
    states = tables.slot_state[tables.slot_leases > 0]
    assert np.isin(states, (READY, QUARANTINED)).all(), "a leased slot was given away"


def _check_slabs(tables: Tables) -> None:
    geometry = tables.geometry
    states = geometry.by_slab(tables.slot_state).reshape(geometry.num_slabs, -1)
    for slab, size in enumerate(tables.slab_block_bytes.tolist()):
        usable = geometry.slab_bytes // geometry.stride(size) if size else 0
        assert (states[slab, usable:] == FREE).all(), f"slab {slab} has slots outside of it"
        assert not size or states[slab].any(), f"slab {slab} is empty but was not given back"
        free = np.count_nonzero(states[slab, :usable] == FREE)
        assert tables.slab_free[slab] == free, f"slab {slab} has {free} free slots"


def _used(tables: Tables) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.flatnonzero((tables.slot_state == READY) | (tables.slot_state == RESERVED))
