"""Rebuilds all of an arena's tables that follow from its slots and lease records."""

import numpy as np

from kvray.store.arena import audit, key_index, lease, slabs
from kvray.store.arena.layout import FREE, LIMBO, PAGE_SLOTS, QUARANTINED, READY, RESERVED
from kvray.store.arena.slots import free, unlink
from kvray.store.arena.tables import Array, Tables


def rebuild(tables: Tables, *, now: float) -> int:
    """Derive everything that follows from the slots and the lease records; `now` is monotonic.

    Takes time over all slots, so only the owner does it: when it finds damage, and after a death in
    a step that was too large for the undo record. The truth is each slot's state and each
    lease page's holder. Key index, lease counts, families and empty slabs follow from it. A process
    that dies in here leaves the same truth to the next. Returns how many slots were given up.
    """
    tables.undo.tear()
    _free_unsound(tables)
    slabs.recount(tables)
    drop_unsound_leases(tables)
    tables.slot_leases[tables.backed] = lease.count_leases(tables)
    used = _used_oldest_first(tables)
    _relink(tables, used)
    tables.index_slot[:] = 0
    tables.index_tag[:] = 0
    lost = key_index.repeated(tables.slot_key[used], tables.slot_part[used])
    kept = used[~lost]
    lost[~lost] = key_index.insert(tables, kept, tables.slot_key[kept], tables.slot_part[kept])
    _give_up(tables, used[lost], now)
    slabs.recount(tables)
    # Nobody knows which changes the dead process had not noted: all slots are looked at.
    tables.events += len(tables.event_slot) + 1
    tables.changes += 1
    tables.undo.settle()
    return int(np.count_nonzero(lost))


def _free_unsound(tables: Tables) -> None:
    """Free the slots whose state cannot be right: nobody can have them."""
    every_slab, writer = np.arange(tables.geometry.num_slabs), tables.slot_holder[tables.backed]
    sizes = tables.sizes_of(every_slab)
    sizes[sizes > tables.geometry.slab_bytes] = 0
    slabs.serve(tables, every_slab, sizes)
    writer[(writer < 0) | (writer > tables.geometry.holders_max)] = 0
    for size in slabs.block_sizes(tables):  # only a flipped bit gives slabs a size without rows
        if not slabs.has_rows(tables, size):
            slabs.serve(tables, every_slab[sizes == size], 0)
    everything = _all_slots(tables)
    tables.slot_state[everything[audit.has_wrong_state(tables, everything)]] = FREE


def drop_unsound_leases(tables: Tables) -> None:
    """Free the pages that cannot be part of a lease."""
    pages = np.flatnonzero(tables.page_holder)
    slots = tables.page_slots[pages]
    states = tables.slot_state[np.where(slots < tables.num_backed, slots, 0)]
    is_readable = (states == READY) | (states == QUARANTINED)
    bad = audit.is_no_record(tables, pages)
    is_named = np.arange(PAGE_SLOTS) < tables.page_count[pages][:, None]
    bad |= (is_named & ~is_readable).any(axis=1)
    tables.page_holder[pages[bad]] = 0


def _used_oldest_first(tables: Tables) -> Array:
    """Return the slots that name a block: READY before RESERVED, each from the oldest on.

    Of two slots that claim one block, that of the interrupted call comes last.
    """
    used = tables.slots_in(READY, RESERVED)
    return used[np.lexsort((tables.slot_tick[used], tables.slot_state[used] != READY))]


def _relink(tables: Tables, used: Array) -> None:
    """Keep a parent link only where the parent is in use and one step nearer to the root."""
    is_linked = np.zeros(tables.num_backed, dtype=bool)
    is_linked[used[~audit.has_wrong_parent(tables, used)]] = True
    tables.slot_parent[tables.backed][~is_linked] = -1
    tables.slot_children[tables.backed] = audit.count_children(tables, _all_slots(tables))


def _give_up(tables: Tables, lost: Array, now: float) -> None:
    """Take slots out of use without breaking a lease or a copy that is under way."""
    reserved = tables.slot_state[lost] == RESERVED
    leased = ~reserved & (tables.slot_leases[lost] > 0)
    tables.slot_since[lost[reserved]] = now
    tables.slot_state[lost[reserved]] = LIMBO
    tables.slot_state[lost[leased]] = QUARANTINED
    unlink(tables, lost[reserved | leased])
    free(tables, lost[~reserved & ~leased])


def _all_slots(tables: Tables) -> Array:
    return np.arange(tables.num_backed)
