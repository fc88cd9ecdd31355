"""Runs of blocks in this node's arena, as bytes: written where missing, read where sound.

If the tier is gone, busy, full or damaged, a caller gets fewer blocks and no error.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.errors import CorruptBlock, KVRayError
from kvray.identity.block import BlockKey
from kvray.node import NodeLink
from kvray.store import Arena, Lease, Reservation
from kvray.store.arena.tables import Array

_log = logging.getLogger("kvray.tensor_cache")

_BUSY_S = 0.25
"""How long to try for an arena that others keep locked: computing the KV again takes longer."""

Source = Callable[[Array], tuple[Array, Array]]
"""Given ascending indexes of blocks, returns a pool of bytes and the row of each block in it."""


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """The leading blocks of a chain that the arena has, held for reading."""

    _arena: Arena
    _lease: Lease
    _verify: bool

    @property
    def num_blocks(self) -> int:
        """Blocks from the root of the chain on."""
        return self._lease.num_slots

    def read(self, first: int, pool: Array) -> int:
        """Copy the blocks from `first` on into the rows of `pool`; return how many are sound.

        If these are not all, nothing that was copied may be used.
        """
        try:
            rows = np.arange(len(pool))
            self._arena.read(self._lease, pool, rows, first=first, verify=self._verify)
            return len(pool)
        except CorruptBlock as error:
            _log.warning("kvray: a shorter prefix was retrieved: %s", error)
        return int(self._arena.sound(self._lease, slice(first, first + len(pool))).argmin())

    def drop_damaged(self) -> None:
        """Take blocks without their checksum out of service."""
        self._arena.sound(self._lease, slice(None))


class ArenaBlocks:
    """Blocks of one size in the arena that `link` is attached to; one part each.

    It converts and copies `blocks_per_step` at a time. With `verify` it checks the blocks that it
    reads. `namespace` owns the blocks, see `block.namespace_id`.
    """

    def __init__(
        self,
        link: NodeLink,
        *,
        block_bytes: int,
        blocks_per_step: int,
        verify: bool,
        namespace: int = 0,
    ):
        self._link = link
        self.namespace = namespace
        self._block_bytes = block_bytes
        self._blocks_per_step = blocks_per_step
        self._verify = verify
        self._said: set[str] = set()

    def count(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading `keys` are here now."""
        arena = self._link.arena
        if arena is not None and keys and not arena.retired:
            with self._tolerant(arena):
                is_here = arena.present(keys, [0])[0]
                return len(keys) if is_here.all() else int(is_here.argmin())
        return 0

    @contextlib.contextmanager
    def leased(self, keys: Sequence[BlockKey]) -> Iterator[LeasedRun | None]:
        """Hold the longest run of leading `keys` that is here; None: not even the first is.

        If the arena is given up meanwhile, the body ends early and without an error.
        """
        arena, leases = self._link.arena, None
        if arena is not None and keys:
            deadline = time.monotonic() + _BUSY_S
            with self._tolerant(arena):
                while leases is None and not arena.retired and time.monotonic() < deadline:
                    leases = arena.lease(keys, block_bytes=self._block_bytes)
        if arena is None or not leases:
            yield None
            return
        try:
            with self._tolerant(arena):
                yield LeasedRun(arena, leases[0], self._verify)
        finally:
            self._until_done(arena, lambda arena: arena.release(*leases))

    def write(
        self, keys: Sequence[BlockKey], first: int, source: Source, *, renew: bool
    ) -> tuple[int, int]:
        """Write those of `keys[first:]` that are missing, in prefix order, as far as there is room.

        `keys` are a whole chain, from its root; without its parent here nothing is written.
        `source` gives the bytes; its indexes count from `first`. `renew` first looks for damage in
        the blocks that are here, and replaces them. Returns how many blocks were stored, and how
        many the arena had already or another writer is writing.
        """
        arena = self._link.arena
        stored = existing = 0
        if arena is None:
            return 0, 0
        if renew:
            with self.leased(keys) as held:
                if held is not None:
                    held.drop_damaged()
        with self._tolerant(arena):
            for start in range(first, len(keys), self._blocks_per_step):
                part = keys[start : start + self._blocks_per_step]
                reservation = self._reserve(arena, keys, start, part)
                if reservation is None:
                    break
                self._fill(arena, reservation, source, reservation.rows + (start - first))
                stored += len(reservation.rows)
                existing += reservation.existing
                if reservation.dropped:
                    self.say_once(
                        "dropped",
                        "kvray: %d blocks were not stored: the tier has no room for them, or has"
                        " not the blocks before them that the mask left out (said once)",
                        len(keys) - start - len(part) + reservation.dropped,
                    )
                    break
        return stored, existing

    def say_once(self, topic: str, message: str, *details: object) -> None:
        """Log a warning, once for each topic."""
        if topic not in self._said:
            self._said.add(topic)
            _log.warning(message, *details)

    def _reserve(
        self, arena: Arena, keys: Sequence[BlockKey], start: int, part: Sequence[BlockKey]
    ) -> Reservation | None:
        reservation = arena.reserve(
            part,
            parent=keys[start - 1] if start else None,
            depth=start,
            part=0,
            block_bytes=self._block_bytes,
            namespace=self.namespace,
            wait_s=_BUSY_S,
        )
        if reservation is None and not arena.retired:
            self.say_once("busy", "kvray: KV was not stored: the arena stays locked by others")
        return reservation

    def _fill(self, arena: Arena, reservation: Reservation, source: Source, blocks: Array) -> None:
        """Write and commit what was reserved; on any failure give it back."""
        if not len(blocks):
            return
        try:
            checksums = arena.write(reservation, *source(blocks))
        except BaseException:
            self._until_done(arena, lambda arena: arena.abort(reservation))
            raise
        self._until_done(arena, lambda arena: arena.commit(reservation, checksums))

    def _until_done(self, arena: Arena, action: Callable[[Arena], bool]) -> None:
        """Act now, or from the link's thread if the arena is busy: the action must not be lost."""
        with self._tolerant(arena):
            if not action(arena):
                self._link.defer(arena, action)

    @contextlib.contextmanager
    def _tolerant(self, arena: Arena) -> Iterator[None]:
        """End the body early, and without an error, at any refusal of the tier.

        This is the boundary of the tensor cache: its user goes on without the tier.
        """
        try:
            yield
        except KVRayError as error:
            if self._link.arena is arena:
                topic = type(error).__name__
                self.say_once(topic, "kvray: KV was not stored or not found: %s", error)
            else:
                _log.debug("kvray: the arena was given up in the middle of a call: %s", error)
