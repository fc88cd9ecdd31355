"""Blocks of one size in this node's tier, as bytes: found, read where valid, written where missing.

If the tier is gone, busy, full or damaged, a caller gets fewer blocks and no error.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvray.errors import KVRayError
from kvray.identity.block import BlockKey
from kvray.node import NodeLink, Registration, StageCalls
from kvray.store import Arena, Lease, Reservation
from kvray.store.arena.tables import Array
from kvray.trace.arrival import Arrivals

_log = logging.getLogger("kvray.tensor_cache")

_BUSY_S = 0.25
"""How long to try for an arena that others keep locked: computing the KV again takes longer."""

_LEAST_S = 0.02
"""A call that has less left after its turn would fail, and the shard be left alone for that."""

Source = Callable[[Array], tuple[Array, Array]]
"""Given ascending indexes of blocks, returns a pool of bytes and the row of each block in it."""

Held = tuple[Arena, Lease]
"""The leading blocks of a chain that the arena has, held for reading."""


class ArenaBlocks:
    """Blocks of one part in the arena that `link` is attached to; any thread may call any method.

    It converts and copies `blocks_per_step` at a time. With `verify` it checks the blocks that it
    reads. `namespace` owns the blocks, see `block.namespace_id`. It stages in the name of the
    `registration`, one call at a time: the holder of `_turn` has the connection.
    """

    def __init__(
        self,
        link: NodeLink,
        registration: Registration,
        *,
        block_bytes: int,
        blocks_per_step: int,
        verify: bool,
        namespace: int,
    ):
        self._link = link
        self._registration = registration
        self.namespace = namespace
        self._block_bytes = block_bytes
        self._blocks_per_step = blocks_per_step
        self._verify = verify
        self._calls = StageCalls(link.directory)
        self._turn = threading.Lock()
        self._said: set[str] = set()

    def close(self) -> None:
        """Hang up; nobody may be inside `find`."""
        self._calls.close()

    def count(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading `keys` are here now."""
        arena = self._link.arena
        if arena is not None and keys and not arena.retired:
            with self._tolerant(arena):
                is_here = arena.present(keys, [0])[0]
                return len(keys) if is_here.all() else int(is_here.argmin())
        return 0

    def find(self, keys: Sequence[BlockKey], *, wait_s: float) -> tuple[int, Arrivals, str]:
        """Have the node's shard bring `keys` here from disk and other nodes, in `wait_s` at most.

        Returns how many leading ones are here, how they came, and why there are not more. Late
        blocks still arrive. The shard keeps staged blocks for `staging.handover_s`; the caller
        leases them before that ends. A call that waits too long for its turn goes on with the
        blocks that are here.
        """
        here, until = self.count(keys), time.monotonic() + wait_s
        if here == len(keys):
            return here, (), "none"
        if self._link.arena is None:
            return here, (), "store_down"
        if wait_s <= 0 or not self._registration.has_peers:
            is_cut_off = self._registration.has_peers is None
            return here, (), "store_down" if is_cut_off else "not_stored"
        if not self._turn.acquire(timeout=wait_s):
            return self.count(keys), (), "too_slow"
        try:
            if not self._calls.can_ask:
                return here, (), "store_down"
            left_s = until - time.monotonic()
            if left_s < min(_LEAST_S, wait_s / 2):
                return self.count(keys), (), "too_slow"
            staged = self._calls.stage(
                keys,
                replica=self._registration.replica,
                rank=self._registration.rank,
                wait_s=left_s,
                tokens_per_s=0.0,  # nobody knows how long computing them would take
            )
        finally:
            self._turn.release()
        if staged.num_blocks > here:
            here = self.count(keys)
        return here, staged.arrivals, staged.reason

    @contextlib.contextmanager
    def leased(self, keys: Sequence[BlockKey]) -> Iterator[Held | None]:
        """Hold the longest run of leading `keys` that is here; None: not even the first is.

        If the arena is given up meanwhile, the body ends early and without an error.
        """
        arena, leases = self._link.arena, None
        if arena is not None and keys:
            with self._tolerant(arena):
                leases = arena.lease(keys, block_bytes=self._block_bytes, wait_s=_BUSY_S)
        if arena is None or not leases:
            yield None
            return
        try:
            with self._tolerant(arena):
                yield arena, leases[0]
        finally:
            self._until_done(arena, lambda arena: arena.release(*leases))

    def read(self, held: Held, first: int) -> Iterator[tuple[int, Array]]:
        """Yield what is valid from block `first` on, in steps; a damaged block ends them.

        A step has the index of its first block, counted from `first`, and the bytes of its blocks,
        u8 [num_blocks, block_bytes], which the next step overwrites.
        """
        arena, lease = held
        step, num_blocks = self._blocks_per_step, lease.num_slots
        pool = np.empty((min(step, max(0, num_blocks - first)), self._block_bytes), dtype=np.uint8)
        for start in range(first, num_blocks, step):
            stop = min(start + step, num_blocks)
            rows, at = pool[: stop - start], np.arange(stop - start)
            if not self._verify:
                arena.read(lease, rows, at, first=start, verify=False)
            elif not (valid := arena.read_valid(lease, slice(start, stop), rows, at)).all():
                _log.warning("kvray: a shorter prefix was retrieved, as a block was damaged")
                yield start - first, rows[: valid.argmin()]
                return
            yield start - first, rows

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
                if held is not None:  # takes blocks without their checksum out of service
                    held[0].valid(held[1], slice(None))
        with self._tolerant(arena):
            for start in range(first, len(keys), self._blocks_per_step):
                part = keys[start : start + self._blocks_per_step]
                reservation = arena.reserve(
                    part,
                    parent=keys[start - 1] if start else None,
                    depth=start,
                    part=0,
                    block_bytes=self._block_bytes,
                    namespace=self.namespace,
                    wait_s=_BUSY_S,
                )
                if reservation is None:
                    if not arena.retired:
                        self.say_once("busy", "KV was not stored: the arena stays locked by others")
                    break
                self._fill(arena, reservation, source, reservation.rows + (start - first))
                stored += len(reservation.rows)
                existing += reservation.existing
                if reservation.dropped:
                    self.say_once(
                        "dropped",
                        "%d blocks were not stored: the tier has no room for them, or has not the"
                        " blocks before them that the mask left out (said once)",
                        len(keys) - start - len(part) + reservation.dropped,
                    )
                    break
        return stored, existing

    def say_once(self, topic: str, message: str, *details: object) -> None:
        """Log a warning, once for each topic."""
        if topic not in self._said:
            self._said.add(topic)
            _log.warning(f"kvray: {message}", *details)

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
                self.say_once(type(error).__name__, "KV was not stored or not found: %s", error)
            else:
                _log.debug("kvray: the arena was given up in the middle of a call: %s", error)
