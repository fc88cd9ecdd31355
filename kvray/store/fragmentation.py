"""How the slabs of an arena are used: blocks, free slots and their runs, bytes that hold nothing.

Blocks of one request are copied in runs of neighbouring slots, and a run never leaves its slab. So
the free slots of a block size count as fragmented where they lie outside the longest free run of
their slab: 0 means that every slab's free memory is in one piece, whatever its size.
"""

from typing import Any

import numpy as np

from kvray.store.layout import FREE, READY
from kvray.store.tables import Array, Tables


def spare_slabs(tables: Tables) -> int:
    """Return how many slabs serve no block size: any may take them."""
    return int(np.count_nonzero(tables.slab_block_bytes == 0))


def slab_use(tables: Tables) -> list[dict[str, Any]]:
    """Return the use of the slabs of each block size, ascending; needs no lock.

    Returns:
        One dict a block size: `block_bytes`, its `slabs`, their `slots`, the `blocks` in them,
        `free_slots`, the `longest_free_run` of them, their `fragmented_share` (see the module),
        and the bytes that no block can use: `slot_waste_bytes` between a block's end and its
        slot's, `slab_waste_bytes` after the last slot of a slab.
    """
    sizes = tables.slab_block_bytes.copy()
    return [
        _use(tables, np.flatnonzero(sizes == size), size) for size in np.unique(sizes[sizes > 0])
    ]


def _use(tables: Tables, slabs: Array, size: np.uint64) -> dict[str, Any]:
    geometry, block_bytes = tables.geometry, int(size)
    stride = geometry.stride(block_bytes)
    per_slab = geometry.slab_bytes // stride
    states = tables.slot_state.reshape(geometry.num_slabs, -1)[slabs, :per_slab]
    free = states == FREE
    num_free, longest = int(np.count_nonzero(free)), _longest_runs(free)
    return {
        "block_bytes": block_bytes,
        "slabs": len(slabs),
        "slots": states.size,
        "blocks": int(np.count_nonzero(states == READY)),
        "free_slots": num_free,
        "longest_free_run": int(longest.max(initial=0)),
        "fragmented_share": 1 - int(longest.sum()) / num_free if num_free else 0.0,
        "slot_waste_bytes": states.size * (stride - block_bytes),
        "slab_waste_bytes": len(slabs) * (geometry.slab_bytes - per_slab * stride),
    }


def _longest_runs(free: Array) -> Array:
    """Return the length of the longest run of set flags in each row."""
    num_rows, num_columns = free.shape
    # A column that is never set keeps the runs of neighbouring rows apart, and ends the last one.
    flags = np.zeros((num_rows, num_columns + 1), dtype=bool)
    flags[:, :-1] = free
    edges = np.flatnonzero(np.diff(flags.ravel(), prepend=False))
    starts, stops = edges[::2], edges[1::2]
    longest = np.zeros(num_rows, dtype=np.int64)
    np.maximum.at(longest, starts // (num_columns + 1), stops - starts)
    return longest
