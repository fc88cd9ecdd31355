"""Rebuild everything in an arena's tables that follows from the slots and the lease records."""

import numpy as np

from kvray.store import key_index, lease
from kvray.store.layout import READY, RESERVED
from kvray.store.slots import free
from kvray.store.tables import Tables


def rebuild(tables: Tables) -> int:
    """Bring the tables back to a consistent state after a process died while changing them.

    The truth is each slot's state word, which is written last, and each lease page's holder,
    likewise. Key index, lease counts and families are derived from them anew. A slot that was
    being made or unmade loses nothing but itself.

    Returns:
        How many slots were given up.
    """
    tables.index_slot[:] = 0
    tables.index_tag[:] = 0
    tables.slot_leases[:] = lease.count_leases(tables)
    used = np.flatnonzero((tables.slot_state == READY) | (tables.slot_state == RESERVED))
    _relink(tables, used)
    lost = used[_duplicates(tables, used)]
    kept = np.setdiff1d(used, lost)
    full = key_index.insert(tables, kept)
    lost = np.concatenate((lost, kept[full]))
    free(tables, lost)
    tables.header["repairs"] += 1
    tables.header["changes"] += 1
    return len(lost)


def _relink(tables: Tables, used: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    """Keep a parent link only where the parent is in use and one step nearer to the root."""
    parents = tables.slot_parent[used].astype(np.int64)
    valid = np.isin(parents, used)
    nearer = np.zeros(len(used), dtype=bool)
    nearer[valid] = (tables.slot_depth[parents[valid]] + 1 == tables.slot_depth[used[valid]]) & (
        tables.slot_part[parents[valid]] == tables.slot_part[used[valid]]
    )
    tables.slot_parent[:] = -1
    tables.slot_children[:] = 0
    tables.slot_parent[used[nearer]] = parents[nearer]
    np.add.at(tables.slot_children, parents[nearer], 1)


def _duplicates(
    tables: Tables, used: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return a mask of the slots that name a key and part which an earlier one names too."""
    identity = np.column_stack((tables.slot_key[used], tables.slot_part[used].astype("<u8")))
    _, first = np.unique(identity, axis=0, return_index=True)
    mask = np.ones(len(used), dtype=bool)
    mask[first] = False
    return mask
