"""Page-aligned memory of this process alone, which costs nothing until it is used."""

import mmap

import numpy as np

from kvray.store.arena.layout import Array, Geometry
from kvray.store.arena.tables import Tables

_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python names from 3.11 on: most tables are never touched."""


def aligned(size: int) -> Array:
    """Return `size` zero bytes, page-aligned for direct I/O."""
    return np.frombuffer(_private(size), dtype="u1", count=size)


def private_tables(geometry: Geometry) -> Tables:
    """Return empty tables; their slots' bytes lie elsewhere."""
    return Tables(_private(geometry.table_bytes), geometry, has_data=False)


def _private(size: int) -> mmap.mmap:
    # Private: a forked child must not write into its parent's tables.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
