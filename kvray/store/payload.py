"""Copies of blocks between an engine's pool and slots, in runs, with checksums.

No lock is held here: the bytes of a reserved slot belong to its writer, those of a leased slot
do not change.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import xxhash

from kvray.errors import ConfigError, LayoutMismatch
from kvray.store.tables import Array, Tables


def write(tables: Tables, slots: Array, pool: Array, block_ids: Array) -> Array:
    """Copy blocks of `pool` into reserved slots; return their checksums, u64 [num_blocks].

    Args:
        tables: the arena's tables.
        slots: reserved slots, one a block.
        pool: bytes of shape [num_blocks, block_bytes].
        block_ids: rows of `pool`, one a slot.

    Each run is summed right after it is copied, while it is still in the cache.

    Raises:
        ConfigError: there are not as many blocks as slots.
        LayoutMismatch: the pool's blocks are of another size than the slots'.
    """
    checksums = np.empty(len(slots), dtype="<u8")
    for start, stop, area in _runs(tables, slots, block_ids, pool.shape[1]):
        first = block_ids[start]
        np.copyto(area, pool[first : first + stop - start])
        checksums[start:stop] = [
            block_checksum(block, int(seed))
            for block, seed in zip(area, tables.slot_key[slots[start:stop], 0], strict=True)
        ]
    return checksums


def read(
    tables: Tables, slots: Array, pool: Array, block_ids: Array, *, verify: bool
) -> Array | None:
    """Copy leased slots into blocks of `pool`; arguments as for `write`.

    Returns:
        With `verify`, a mask of the copies that have their checksum; else None.
    """
    sound = np.ones(len(slots), dtype=bool) if verify else None
    for start, stop, area in _runs(tables, slots, block_ids, pool.shape[1]):
        copies = pool[block_ids[start] : block_ids[start] + stop - start]
        np.copyto(copies, area)
        if sound is not None:
            sound[start:stop] = _verify_rows(tables, slots[start:stop], copies)
    return sound


def verify(tables: Tables, slots: Array, block_bytes: int) -> Array:
    """Return a mask of the leased `slots` whose bytes have the checksum recorded for them."""
    sound = np.empty(len(slots), dtype=bool)
    for start, stop, area in _runs(tables, slots, np.arange(len(slots)), block_bytes):
        sound[start:stop] = _verify_rows(tables, slots[start:stop], area)
    return sound


def block_checksum(block: Array, seed: int) -> int:
    """Return the xxh3 of a block's bytes, seeded with the first 8 bytes of its key."""
    return xxhash.xxh3_64_intdigest(block.data, seed)


def _runs(
    tables: Tables, slots: Array, block_ids: Array, block_bytes: int
) -> Iterator[tuple[int, int, Array]]:
    """Yield (start, stop, bytes) of each run that is contiguous in slots and in blocks.

    The bytes are the run's slots, shape [stop - start, block_bytes].
    """
    if len(slots) != len(block_ids):
        raise ConfigError(
            f"{len(block_ids)} blocks cannot be copied from or to {len(slots)} slots; give one"
            " row of the pool for each slot."
        )
    if not len(slots):
        return
    per_slab = tables.geometry.slots_per_slab
    breaks = (np.diff(slots) != 1) | (np.diff(block_ids) != 1)
    breaks |= np.diff(slots // per_slab) != 0
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
    for start, stop in pairwise(edges):
        slab, row = divmod(int(slots[start]), per_slab)
        if tables.slab_block_bytes[slab] != block_bytes:
            raise LayoutMismatch(
                f"The pool's blocks have {block_bytes} bytes, those in the arena"
                f" {tables.slab_block_bytes[slab]}; they are not of one namespace."
            )
        yield start, stop, tables.rows(slab)[row : row + stop - start, :block_bytes]


def _verify_rows(tables: Tables, slots: Array, rows: Array) -> Array:
    """Return a mask of the `rows` (bytes, [n, block_bytes]) that are what `slots` should hold."""
    seeds, checksums = tables.slot_key[slots, 0], tables.slot_checksum[slots]
    return np.fromiter(
        (
            block_checksum(row, int(seed)) == int(checksum)
            for row, seed, checksum in zip(rows, seeds, checksums, strict=True)
        ),
        dtype=bool,
        count=len(slots),
    )
