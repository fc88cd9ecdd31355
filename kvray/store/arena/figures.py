"""An arena's figures for people: its contents, its holders, and the use of its slabs.

Copies run over neighbouring slots of one slab. So free slots of a block size count as fragmented
where they lie outside the longest free run of their slab. 0 means that every slab's free memory is
in one piece.
"""

from typing import Any

import numpy as np

from kvray.store.arena import quotas, slabs
from kvray.store.arena.layout import FREE, QUARANTINED, READY
from kvray.store.arena.tables import Array, Tables

_NAMESPACES_MAX = 256
_COUNTED = ("stored", "evicted", "dropped", "corrupt", "repairs", "over_quota")


def figures(tables: Tables) -> dict[str, Any]:
    """Return the figures; read without the lock, so they may be a moment apart."""
    geometry, header = tables.geometry, tables.header
    states = tables.slot_state[tables.backed]
    ready = states == READY
    sizes = np.where(tables.slab_block_bytes > geometry.slab_bytes, 0, tables.slab_block_bytes)
    # More than fits is nonsense that the shard has not mended yet; people get numbers that can be.
    most = geometry.slab_bytes // np.maximum(sizes, geometry.slot_min)
    per_slab = np.minimum(geometry.by_slab(ready).sum(axis=(1, 2)), most)
    return {
        "shard_epoch": int(header["shard_epoch"]),
        "capacity_bytes": geometry.capacity,
        "resident_bytes": int((per_slab * sizes).sum()),
        "blocks": int(ready.sum()),
        "leased_blocks": int((tables.slot_leases[tables.backed] > 0).sum()),
        "quarantined_blocks": int((states == QUARANTINED).sum()),
        "holders": int(np.count_nonzero(tables.holder_live)),
        "slabs": slab_use(tables),
        "spare_slabs": slabs.num_spare(tables),
        "namespaces": by_namespace(tables),
        **{name: int(header[name]) for name in _COUNTED},
    }


def by_namespace(tables: Tables) -> list[dict[str, Any]]:
    """Return the blocks and bytes of the largest namespaces, in order; "" is an unknown one."""
    found = sorted(quotas.used(tables).items(), key=lambda one: -one[1][1])
    return [
        {
            "namespace": quotas.name_of(namespace) if namespace else "",
            "blocks": num_blocks,
            "bytes": num_bytes,
            "quota_bytes": quotas.quota_of(tables, namespace),
        }
        for namespace, (num_blocks, num_bytes) in found[:_NAMESPACES_MAX]
    ]


def slab_use(tables: Tables) -> list[dict[str, Any]]:
    """Return the use of the slabs of each block size, ascending; needs no lock.

    `slot_waste_bytes` lie between a block's end and its slot's, `slab_waste_bytes` after the last
    slot of a slab; no block can use them.
    """
    return [_use(tables, size) for size in slabs.block_sizes(tables)]


def _use(tables: Tables, block_bytes: int) -> dict[str, Any]:
    geometry, stride = tables.geometry, tables.geometry.stride(block_bytes)
    own = np.flatnonzero(tables.slab_block_bytes == block_bytes)
    per_slab = geometry.slab_bytes // stride
    states = slabs.states_in(tables, own, per_slab)
    free = states == FREE
    num_free, longest = int(np.count_nonzero(free)), _longest_runs(free)
    return {
        "block_bytes": block_bytes,
        "slabs": len(own),
        "slots": states.size,
        "blocks": int(np.count_nonzero(states == READY)),
        "free_slots": num_free,
        "longest_free_run": int(longest.max(initial=0)),
        "fragmented_share": 1 - int(longest.sum()) / num_free if num_free else 0.0,
        "slot_waste_bytes": states.size * (stride - block_bytes),
        "slab_waste_bytes": len(own) * (geometry.slab_bytes - per_slab * stride),
    }


def _longest_runs(free: Array) -> Array:
    num_rows, num_columns = free.shape
    # A column that is never set keeps the runs of neighbouring rows apart, and ends the last one.
    flags = np.zeros((num_rows, num_columns + 1), dtype=bool)
    flags[:, :-1] = free
    edges = np.flatnonzero(np.diff(flags.ravel(), prepend=False))
    starts, stops = edges[::2], edges[1::2]
    longest = np.zeros(num_rows, dtype=np.int64)
    np.maximum.at(longest, starts // (num_columns + 1), stops - starts)
    return longest
