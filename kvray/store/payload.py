"""Copies of blocks between an engine's pool and slots, in runs, with checksums.

No lock is held here: the bytes of a reserved slot belong to its writer, those of a leased slot
do not change.

A copy is bound by memory, and so is the sum of what has left the cache. What is summed is therefore
copied in pieces that are still in the core's own cache when they are summed, and many large blocks
by two threads; what is not summed is copied a whole run at a time.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from kvray.errors import ConfigError, LayoutMismatch
from kvray.store.tables import Array, Tables

_PIECE_BYTES = 512 * 2**10
"""Twice this fits into a core's own cache of 1 MiB or more: a piece, and where it goes."""

_SHARED_BYTES = 8 * 2**20
"""From here on a second thread saves more than it costs to start, if blocks are larger than a
piece: for small ones the two would wait for each other's turn of the GIL too often."""


class _Run(NamedTuple):
    """Blocks that are contiguous in slots and in the pool; both are [num_blocks, block_bytes]."""

    first: int
    """Index of the first of them among the blocks that were asked for."""
    in_arena: Array
    in_pool: Array


def write(tables: Tables, slots: Array, pool: Array, block_ids: Array) -> Array:
    """Copy blocks of `pool` into reserved slots; return their checksums, u64 [num_blocks].

    Args:
        tables: the arena's tables.
        slots: reserved slots, one a block.
        pool: bytes of shape [num_blocks, block_bytes].
        block_ids: rows of `pool`, one a slot.

    Raises:
        ConfigError: there are not as many blocks as slots.
        LayoutMismatch: the pool's blocks are of another size than the slots'.
    """
    copies = _Copies(tables, slots)
    for run in _runs(tables, slots, pool, block_ids):
        copies.add(run.first, target=run.in_arena, source=run.in_pool)
    return copies.make()


def read(
    tables: Tables, slots: Array, pool: Array, block_ids: Array, *, verify: bool
) -> Array | None:
    """Copy leased slots into blocks of `pool`; arguments as for `write`.

    Returns:
        With `verify`, a mask of the copies that have their checksum; else None.
    """
    runs = _runs(tables, slots, pool, block_ids)
    if not verify:
        for run in runs:
            np.copyto(run.in_pool, run.in_arena)
        return None
    copies = _Copies(tables, slots)
    for run in runs:
        copies.add(run.first, target=run.in_pool, source=run.in_arena)
    sound: Array = copies.make() == tables.slot_checksum[slots]
    return sound


def verify(tables: Tables, slots: Array, block_bytes: int) -> Array:
    """Return a mask of the leased `slots` whose bytes have the checksum recorded for them."""
    checksums = np.empty(len(slots), dtype="<u8")
    seeds = tables.slot_key[slots, 0].tolist()
    for first, stop, area in _areas(tables, slots, np.arange(len(slots)), block_bytes):
        checksums[first:stop] = _sum_rows(area, seeds[first:stop])
    sound: Array = checksums == tables.slot_checksum[slots]
    return sound


class _Copies:
    """Copies to make and to sum. Two threads may make them: each takes what is next."""

    def __init__(self, tables: Tables, slots: Array) -> None:
        self._seeds: list[int] = tables.slot_key[slots, 0].tolist()
        self._checksums = [0] * len(slots)  # a list: it takes a few numbers at a time for less
        self._turns: list[tuple[int, Array, Array]] = []
        self._large_bytes = 0

    def add(self, first: int, *, target: Array, source: Array) -> None:
        """Take on the blocks from `first` on: as many at a time as a piece holds, at least one."""
        step = max(1, _PIECE_BYTES // source.shape[1])
        if source.shape[1] > _PIECE_BYTES:
            self._large_bytes += source.nbytes
        self._turns += [
            (first + at, target[at : at + step], source[at : at + step])
            for at in range(0, len(source), step)
        ]

    def make(self) -> Array:
        """Make them all; return the checksums of what is in the targets now."""
        turns = iter(self._turns)
        if self._large_bytes < _SHARED_BYTES or len(os.sched_getaffinity(0)) == 1:
            self._take(turns)
        else:
            with ThreadPoolExecutor(1, "kvray-copy") as pool:
                # What crosses: `turns`, of which each thread takes the next, and its checksums.
                other = pool.submit(self._take, turns)
                self._take(turns)
                other.result()
        return np.array(self._checksums, dtype="<u8")

    def _take(self, turns: Iterator[tuple[int, Array, Array]]) -> None:
        """Make copies until there are none left to make."""
        for first, target, source in turns:
            stop = first + len(target)
            seeds = self._seeds[first:stop]
            if source.shape[1] > _PIECE_BYTES:
                self._checksums[first] = _copy_large(target[0], source[0], seeds[0])
            else:
                np.copyto(target, source)
                self._checksums[first:stop] = _sum_rows(target, seeds)


def _sum_rows(rows: Array, seeds: list[int]) -> list[int]:
    """Return the checksum of each block: xxh3, seeded with the first 8 bytes of its key."""
    return list(map(xxhash.xxh3_64_intdigest, rows, seeds))


def _copy_large(target: Array, source: Array, seed: int) -> int:
    """Copy one block piece by piece; return what `_sum_rows` would of the copy."""
    digest = xxhash.xxh3_64(seed=seed)
    for at in range(0, len(source), _PIECE_BYTES):
        piece = target[at : at + _PIECE_BYTES]
        np.copyto(piece, source[at : at + _PIECE_BYTES])
        digest.update(piece.data)
    return digest.intdigest()


def _runs(tables: Tables, slots: Array, pool: Array, block_ids: Array) -> Iterator[_Run]:
    """Yield the runs of blocks that are contiguous in slots and in the pool."""
    for start, stop, area in _areas(tables, slots, block_ids, pool.shape[1]):
        row = block_ids[start]
        yield _Run(start, area, pool[row : row + stop - start])


def _areas(
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
