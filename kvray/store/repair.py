"""Rebuild everything in an arena's tables that follows from the slots and the lease records."""

import numpy as np

from kvray.store import key_index, lease, slabs
from kvray.store.layout import FREE, LIMBO, QUARANTINED, READY, RESERVED
from kvray.store.slots import free, unlink
from kvray.store.tables import Array, Tables


def rebuild(tables: Tables, *, now: float) -> int:
    """Derive again, from the slots and the lease records, everything that follows from them.

    The owner's alone, since it takes time over all slots: when it takes an arena over, and when a
    process died in a step that was too large for the undo record. The truth is each slot's state
    and each lease page's holder. Key index, lease counts, families and empty slabs are made anew.
    Whoever dies in here leaves the same truth to the next.

    Args:
        tables: the arena's tables.
        now: monotonic seconds.

    Returns:
        How many slots were given up.
    """
    tables.undo.tear()
    _free_unsound(tables)
    lease.drop_unsound(tables)
    tables.slot_leases[:] = lease.count_leases(tables)
    used = _used_oldest_first(tables)
    _relink(tables, used)
    tables.index_slot[:] = 0
    tables.index_tag[:] = 0
    lost = _duplicates(tables, used)
    kept = used[~lost]
    lost[~lost] = key_index.insert(tables, kept, tables.slot_key[kept], tables.slot_part[kept])
    _give_up(tables, used[lost], now)
    slabs.give_back(tables, np.arange(tables.geometry.num_slots))
    # Which changes the dead had not noted is not known: to whoever announces them, all are new.
    tables.slot_version += 1
    tables.changes += 1
    tables.undo.settle()
    return int(np.count_nonzero(lost))


def _free_unsound(tables: Tables) -> None:
    """Free the slots that cannot be what they say, whatever wrote them: nobody can have them."""
    geometry, sizes = tables.geometry, tables.slab_block_bytes
    sizes[sizes > geometry.slab_bytes] = 0
    usable = np.array(
        [geometry.slab_bytes // geometry.stride(size) if size else 0 for size in sizes.tolist()]
    )
    state, writer = tables.slot_state, tables.slot_holder
    outside = (np.arange(geometry.slots_per_slab) >= usable[:, None]).ravel()
    writer[(writer < 0) | (writer > geometry.holders_max)] = 0
    state[outside | (state > QUARANTINED) | ((state == RESERVED) & (writer == 0))] = FREE


def _used_oldest_first(tables: Tables) -> Array:
    """Return the slots that name a block: READY before RESERVED, each from the oldest on.

    Where two claim what only one can have, the one that the interrupted call brought is last.
    """
    used = np.flatnonzero((tables.slot_state == READY) | (tables.slot_state == RESERVED))
    return used[np.lexsort((tables.slot_tick[used], tables.slot_state[used] != READY))]


def _relink(tables: Tables, used: Array) -> None:
    """Keep a parent link only where the parent is in use and one step nearer to the root."""
    parents = tables.slot_parent[used].astype(np.int64)
    is_used = np.zeros(tables.geometry.num_slots, dtype=bool)
    is_used[used] = True
    valid = (parents >= 0) & (parents < len(is_used))
    valid[valid] = is_used[parents[valid]]
    valid[valid] = (
        tables.slot_depth[parents[valid]].astype(np.int64) + 1 == tables.slot_depth[used[valid]]
    ) & (tables.slot_part[parents[valid]] == tables.slot_part[used[valid]])
    tables.slot_parent[used[~valid]] = -1
    tables.slot_parent[~is_used] = -1
    tables.slot_children[:] = np.bincount(parents[valid], minlength=len(is_used))


def _duplicates(tables: Tables, used: Array) -> Array:
    """Return a mask of the slots that name a key and part which an earlier one names too."""
    identity = np.column_stack((tables.slot_key[used], tables.slot_part[used].astype("<u8")))
    _, first = np.unique(identity, axis=0, return_index=True)
    mask = np.ones(len(used), dtype=bool)
    mask[first] = False
    return mask


def _give_up(tables: Tables, lost: Array, now: float) -> None:
    """Take slots out of use without breaking a lease, nor a copy that is still under way."""
    reserved = tables.slot_state[lost] == RESERVED
    leased = ~reserved & (tables.slot_leases[lost] > 0)
    tables.slot_since[lost[reserved]] = now
    tables.slot_state[lost[reserved]] = LIMBO
    tables.slot_state[lost[leased]] = QUARANTINED
    unlink(tables, lost[reserved | leased])
    free(tables, lost[~reserved & ~leased])
