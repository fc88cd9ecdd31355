"""Brings blocks from a store's files into free slots of its node's arena, along a prefix.

It reads the whole rest of a prefix ahead, piece by piece from its front. The longer an engine
waits, the more of the prefix is READY, and never with a gap.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store.arena import key_index
from kvray.store.arena.arena import Arena
from kvray.store.arena.payload import runs
from kvray.store.arena.slots import Reservation
from kvray.store.arena.tables import Array
from kvray.store.nvme.store import NvmeStore

_PIECE_BYTES = 32 * 2**20
"""Bytes that are read before they become READY: enough to keep a device busy."""
_LOCK_WAIT_S = 0.5

Promoted = Callable[[Array, Array], None]
"""Called with slots of the arena, and the store's slots of the same blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Blocks that a promotion has made READY."""

    num_blocks: int
    num_bytes: int
    num_unreadable: int  # blocks that the store should have, and could not read


class Promoter:
    """Promotes blocks of `store` into `arena`. Thread-safe; waits for the device."""

    def __init__(self, arena: Arena, store: NvmeStore, promoted: Promoted) -> None:
        """Promote into `arena`, which this process has joined, and tell `promoted` of it."""
        self._arena = arena
        self._store = store
        self._promoted = promoted
        self.num_pieces = 0
        """Reads that have ended, well or not: the count stands still if the device hangs."""

    def promote(
        self,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey | None,
        depth: int,
        part: int,
        needs_parent: bool,
        deadline: float,
    ) -> Brought:
        """Bring leading blocks of a chain here, for as long as there is time and room.

        Arguments as for `Arena.reserve`; `keys` that are here already are passed over. No piece
        begins after `deadline`, a time of `time.monotonic`. ShardUnavailable: arena or store is
        busy, retired or closed.
        """
        packed = key_index.pack_keys(keys)
        found, sizes = self._store.find(packed, part)
        tables = self._store.tables
        num_blocks = num_bytes = num_unreadable = 0
        for start, stop in _pieces(sizes):
            if time.monotonic() > deadline:
                break
            size = int(sizes[start])
            made = self._arena.reserve(
                keys[start:stop],
                parent=keys[start - 1] if start else parent,
                depth=depth + start,
                part=part,
                block_bytes=size,
                needs_parent=needs_parent or start > 0,
                wait_s=_LOCK_WAIT_S,
                namespace=int(tables.slot_namespace[found[start]]),
                priority=tables.slot_priority[found[start:stop]],
                head=int(tables.slot_head[found[start]]),
            )
            if made is None:
                raise ShardUnavailable("The arena of this node is busy or retired.")
            num_good = self._fill(made, packed[start:stop], found[start:stop], part)
            num_unreadable += len(made.slots) - num_good
            num_blocks += num_good
            num_bytes += num_good * size
            if made.dropped or num_good < len(made.slots):
                break
        return Brought(num_blocks=num_blocks, num_bytes=num_bytes, num_unreadable=num_unreadable)

    def _fill(self, made: Reservation, keys: Array, found: Array, part: int) -> int:
        """Read blocks, which the store has in `found`; return how many are READY now."""
        try:
            read = self._store.read(keys[made.rows], part, self._arena.tables, made.slots)
            good = made.only(read.sound)
            if not self._arena.commit(good, read.checksums[read.sound]):
                raise ShardUnavailable("The arena of this node stays locked; blocks are given up.")
        finally:
            self.num_pieces += 1
            # A slot that is READY by now has left the reservation.
            self._arena.abort(made)
        self._promoted(good.slots, found[made.rows][read.sound])
        return len(good.slots)


def _pieces(sizes: Array) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of leading blocks that are there, of one size and not too many bytes."""
    missing = np.flatnonzero(sizes == 0)
    sizes = sizes[: missing[0]] if len(missing) else sizes
    for first, last in runs(np.diff(sizes) != 0, len(sizes)):
        step = max(1, _PIECE_BYTES // int(sizes[first]))
        for start in range(first, last, step):
            yield start, min(start + step, last)
