"""Finds contradictions in an arena's tables, such as a flipped bit leaves, and rebuilds the tables.

All that follows from slots and lease records is derived again. `find` changes nothing.
"""

from collections.abc import Mapping

import numpy as np

from kvray.store.arena import key_index, lease, slabs
from kvray.store.arena.layout import (
    BUCKET_WAYS,
    FREE,
    LIMBO,
    PAGE_SLOTS,
    QUARANTINED,
    READY,
    RESERVED,
    SIZE_FACTOR,
)
from kvray.store.arena.slots import free, unlink
from kvray.store.arena.tables import Array, Tables

Damage = Mapping[str, Array]
"""Kind of damage -> the rows where it is, ascending; empty entries are left out."""

_SHARE_SLOTS = 65_536


def shares(tables: Tables) -> list[range]:
    """Return all slabs, in order, as ranges that are looked at together."""
    at_once = max(1, _SHARE_SLOTS // tables.geometry.slots_per_slab)
    num_slabs = tables.geometry.num_slabs
    return [range(at, min(at + at_once, num_slabs)) for at in range(0, num_slabs, at_once)]


def find(tables: Tables, share: range) -> Damage:
    """Return what is wrong in some slabs, and in the same share of slots, key index, lease pages.

    docs/arena_format.md lists the names; rows of `entries` are places in the key index.
    """
    geometry = tables.geometry
    slots = _share(share, tables, tables.num_backed)
    states = tables.slot_state[slots]
    is_used = (states == READY) | (states == RESERVED)
    leases = lease.count_leases(tables)[slots]
    is_leasable = (states == READY) | (states == QUARANTINED)
    entries = _share(share, tables, geometry.num_buckets * BUCKET_WAYS)
    pages = _share(share, tables, geometry.num_pages)
    own = slice(share.start, share.stop)
    sizes = tables.slab_block_bytes[own]
    is_wrong = (sizes > 0) & slabs.are_empty(tables, np.arange(share.start, share.stop))
    is_wrong |= (sizes > geometry.slab_bytes) | (sizes * SIZE_FACTOR != tables.slab_check[own])
    found = {
        "slabs": np.flatnonzero(is_wrong) + share.start,
        "counts": share.start
        + np.flatnonzero(tables.slab_free[own] != slabs.count_free(tables, share)),
        "states": slots[has_wrong_state(tables, slots)],
        "parents": slots[is_used][has_wrong_parent(tables, slots[is_used])],
        "children": slots[tables.slot_children[slots] != count_children(tables, slots)],
        "index": slots[is_used][_is_not_found(tables, slots[is_used])],
        "entries": entries[_names_nothing(tables, entries)],
        "leases": slots[(tables.slot_leases[slots] != leases) | (leases > 0) & ~is_leasable],
        "records": pages[is_no_record(tables, pages)],
    }
    return {name: rows for name, rows in found.items() if len(rows)}


def lasting(tables: Tables, share: range) -> Damage:
    """Return what two looks without the lock both find wrong.

    One look would take a step that is under way for damage.
    """
    found = find(tables, share)
    return both(found, find(tables, share)) if found else found


def both(one: Damage, other: Damage) -> Damage:
    """Return the damage that both have."""
    shared = {name: np.intersect1d(one[name], other[name]) for name in one if name in other}
    return {name: rows for name, rows in shared.items() if len(rows)}


def _share(share: range, tables: Tables, num_rows: int) -> Array:
    num_slabs = tables.geometry.num_slabs
    first, stop = (one * num_rows // num_slabs for one in (share.start, share.stop))
    return np.arange(first, stop)


def has_wrong_state(tables: Tables, slots: Array) -> Array:
    """Return a mask of the `slots` whose state is no state, or cannot be there."""
    geometry, states = tables.geometry, tables.slot_state[slots]
    slab, position = geometry.place_of(slots)
    usable = slabs.usable_in(tables, np.arange(geometry.num_slabs))
    writer = tables.slot_holder[slots]
    wrong: Array = (states > QUARANTINED) | (position >= usable[slab]) & (states != FREE)
    wrong |= (writer < 0) | (writer > geometry.holders_max)
    wrong |= (states == RESERVED) & (writer == 0)
    return wrong


def has_wrong_parent(tables: Tables, used: Array) -> Array:
    """Return a mask of the slots `used` whose parent is not in use, or not the block before."""
    named, parents = tables.slot_parent[used], tables.parents(used)
    states = tables.slot_state[parents]
    right: Array = (states == READY) | (states == RESERVED)
    right &= tables.slot_part[parents] == tables.slot_part[used]
    right &= tables.slot_depth[parents].astype(np.int64) + 1 == tables.slot_depth[used]
    wrong: Array = (named != -1) & ((parents < 0) | ~right)
    return wrong


def count_children(tables: Tables, slots: Array) -> Array:
    """Return how many READY and RESERVED slots name each of `slots`, a range, as their parent."""
    parents = tables.parents(tables.backed).astype(np.int64) - slots[0]
    counted, states = (parents >= 0) & (parents < len(slots)), tables.slot_state[tables.backed]
    counted &= (states == READY) | (states == RESERVED)
    counts: Array = np.bincount(parents[counted], minlength=len(slots))
    return counts


def _is_not_found(tables: Tables, used: Array) -> Array:
    bucket, tag = key_index.place(tables, used)
    here = (tables.index_slot[bucket] == (used + 1)[:, None]) & (
        tables.index_tag[bucket] == tag[:, None]
    )
    wrong: Array = np.count_nonzero(here, axis=1) != 1
    return wrong


def _names_nothing(tables: Tables, entries: Array) -> Array:
    named = tables.columns["index_slot"][entries].astype(np.int64) - 1
    inside = named < tables.num_backed
    slots = np.where(inside, named, -1)
    states = tables.slot_state[slots]
    right = inside & ((states == READY) | (states == RESERVED))
    right &= key_index.place(tables, slots)[0] == entries // BUCKET_WAYS
    wrong: Array = (named >= 0) & ~right
    return wrong


def is_no_record(tables: Tables, pages: Array) -> Array:
    """Return a mask of the lease `pages` that are taken and name something out of bounds."""
    holders, counts = tables.page_holder[pages], tables.page_count[pages]
    following, slots = tables.page_next[pages], tables.page_slots[pages]
    wrong: Array = (holders < 0) | (holders > tables.geometry.holders_max)
    wrong |= (counts > PAGE_SLOTS) | (following < -1) | (following >= tables.geometry.num_pages)
    outside = slots >= tables.num_backed
    wrong |= (outside & (np.arange(PAGE_SLOTS) < counts[:, None])).any(axis=1)
    wrong &= holders != 0
    return wrong


def rebuild(tables: Tables, *, now: float) -> int:
    """Derive everything that follows from the slots and the lease records; `now` is monotonic.

    Takes time over all slots, so only the owner does it: when it finds damage, and after a death in
    a step that was too large for the undo record. The truth is each slot's state and each
    lease page's holder. Key index, lease counts, families and empty slabs follow from it. A process
    that dies in here leaves the same truth to the next. Returns how many slots were given up.
    """
    tables.undo.tear()
    _free_invalid(tables, now)
    slabs.recount(tables)
    drop_invalid_leases(tables)
    tables.slot_leases[tables.backed] = lease.count_leases(tables)
    # READY before RESERVED, each from the oldest on: of two slots that claim one block, that of the
    # interrupted call comes last.
    used = tables.slots_in(READY, RESERVED)
    used = used[np.lexsort((tables.slot_tick[used], tables.slot_state[used] != READY))]
    # A parent link stays only where the parent is in use and one step nearer to the root.
    is_linked = np.zeros(tables.num_backed, dtype=bool)
    is_linked[used[~has_wrong_parent(tables, used)]] = True
    tables.slot_parent[tables.backed][~is_linked] = -1
    tables.slot_children[tables.backed] = count_children(tables, np.arange(tables.num_backed))
    tables.index_slot[:] = 0
    tables.index_tag[:] = 0
    lost = key_index.repeated(tables.slot_key[used], tables.slot_part[used])
    kept = used[~lost]
    lost[~lost] = key_index.insert(tables, kept, tables.slot_key[kept], tables.slot_part[kept])
    _give_up(tables, used[lost], now)
    slabs.recount(tables)
    # Nobody knows which changes the dead process had not noted: all slots are looked at.
    tables.counts.events += len(tables.event_slot) + 1
    tables.counts.changes += 1
    tables.undo.settle()
    return int(np.count_nonzero(lost))


def _free_invalid(tables: Tables, now: float) -> None:
    """Take the slots whose state cannot be right out of use."""
    every_slab, writer = np.arange(tables.geometry.num_slabs), tables.slot_holder[tables.backed]
    sizes = tables.sizes_of(every_slab)
    sizes[sizes > tables.geometry.slab_bytes] = 0
    slabs.serve(tables, every_slab, sizes)
    writer[(writer < 0) | (writer > tables.geometry.holders_max)] = 0
    for size in slabs.block_sizes(tables):  # only a flipped bit gives slabs a size without rows
        if not slabs.has_rows(tables, size):
            slabs.serve(tables, every_slab[sizes == size], 0)
    everything = np.arange(tables.num_backed)
    for state in (LIMBO, FREE):  # FREE outside of a slab; inside somebody may still write there
        wrong = has_wrong_state(tables, everything)
        tables.slot_since[everything[wrong]], tables.slot_state[everything[wrong]] = now, state


def drop_invalid_leases(tables: Tables) -> None:
    """Free the pages that cannot be part of a lease."""
    pages = np.flatnonzero(tables.page_holder != 0)
    slots = tables.page_slots[pages]
    states = tables.slot_state[np.where(slots < tables.num_backed, slots, 0)]
    is_readable = (states == READY) | (states == QUARANTINED)
    bad = is_no_record(tables, pages)
    is_named = np.arange(PAGE_SLOTS) < tables.page_count[pages][:, None]
    bad |= (is_named & ~is_readable).any(axis=1)
    tables.page_holder[pages[bad]] = 0


def _give_up(tables: Tables, lost: Array, now: float) -> None:
    """Take slots out of use without breaking a lease or a copy that is under way."""
    reserved = tables.slot_state[lost] == RESERVED
    leased = ~reserved & (tables.slot_leases[lost] > 0)
    tables.slot_since[lost[reserved]] = now
    tables.slot_state[lost[reserved]] = LIMBO
    tables.slot_state[lost[leased]] = QUARANTINED
    unlink(tables, lost[reserved | leased])
    free(tables, lost[~reserved & ~leased])
