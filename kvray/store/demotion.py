"""The order in which blocks are written to the tier below: no block before its ancestors."""

from collections.abc import Callable

import numpy as np

from kvray.store.arena.tables import Array, Tables


def paths_to(tables: Tables, slots: Array, is_below: Callable[[Array], Array]) -> list[Array]:
    """Return paths to write so that `slots` and all their ancestors are in the tier below.

    Changes nothing; without the lock the result may be out of date. `tables` are those of the upper
    tier, of whose slots `is_below` gives a mask: those that the tier below has. A path leads from a
    block to one of its descendants. The block before a path is below, in an earlier path, or there
    is none.
    """
    parent = tables.parents()
    wanted = np.zeros(len(parent), dtype=bool)
    level = slots
    while len(level):
        level = level[~wanted[level]]
        level = level[~is_below(level)]
        wanted[level] = True
        level = parent[level].astype(np.int64)
        level = np.unique(level[level >= 0])
    found = np.flatnonzero(wanted)
    found = found[np.argsort(tables.slot_depth[found], kind="stable")]
    # A block goes on with its parent's path, unless another child of it does already.
    paths: dict[int, list[int]] = {}
    by_end: dict[int, int] = {}
    for slot, before in zip(found.tolist(), parent[found].tolist(), strict=True):
        start = by_end.pop(before, slot)
        paths.setdefault(start, []).append(slot)
        by_end[slot] = start
    return [np.array(path, dtype=np.int64) for path in paths.values()]
