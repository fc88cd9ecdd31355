"""Slabs without a file, because the disk is full: out of use until there is room.

Pure, like `slabs`: the caller holds the store's lock. A closed slab serves a block size that fits
nowhere, and its first slot is in LIMBO. So it is not spare, and nobody clears it.
"""

import numpy as np

from kvray.store.arena import slabs
from kvray.store.arena.layout import FREE, LIMBO, Array
from kvray.store.arena.tables import Tables

CLOSED = 2**62  # stands for the block size of a closed slab


def close_spare(tables: Tables, has_file: Array) -> Array:
    """Close the spare slabs without a file, and return them; `has_file` masks all slabs."""
    closed = np.flatnonzero((tables.slab_block_bytes == 0) & ~has_file)
    slabs.serve(tables, closed, CLOSED)
    tables.put(tables.geometry.slots_at(closed, 0), slot_state=LIMBO)
    return closed


def reopen(tables: Tables) -> None:
    """Make every closed slab spare again."""
    closed = np.flatnonzero(tables.slab_block_bytes == CLOSED)
    tables.put(tables.geometry.slots_at(closed, 0), slot_state=FREE)
    slabs.serve(tables, closed, 0)


def num_closed(tables: Tables) -> int:
    """Return how many slabs wait for room on the disk."""
    return int(np.count_nonzero(tables.slab_block_bytes == CLOSED))
