"""The reads of a shard's NVMe tier: threads that promote blocks, and how the device answers them.

Used by the shard's event loop. Each read runs in a thread, to which the promoter crosses; nobody
waits for one that hangs.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.staging.plan import Peer, runs_of
from kvray.actors.staging.rates import Rates
from kvray.breaker import Breaker
from kvray.errors import KVRayError, TransferTimeout
from kvray.identity.block import BlockKey, split_keys
from kvray.index import Run
from kvray.store import Arena
from kvray.store.arena import key_index
from kvray.store.nvme import NvmeStore
from kvray.store.promoter import Brought, Promoted, Promoter
from kvray.trace.arrival import NVME

_log = logging.getLogger("kvray.shard")

_STALL_S = 2.0
"""The device counts as hung when reads are under way and none ends for this long."""
_BAD_READS_MAX = 3
"""The device counts as failed after it refuses this many reads in a row."""


class NvmeReads:
    """Reads blocks of one store into the arena."""

    def __init__(
        self,
        arena: Arena,
        store: NvmeStore,
        promoted: Promoted,
        *,
        directory: Path,
        reads_max: int,
    ) -> None:
        """Read at most `reads_max` spans at once; `directory` is for messages."""
        self._arena = arena
        self._store = store
        self._promoter = Promoter(arena, store, promoted)
        self._directory = directory
        self._reads_max = reads_max
        self._readers = ThreadPoolExecutor(reads_max, "kvray-promote")
        self._reads: set[Future[Brought]] = set()
        self._rates = Rates()
        self._breaker = Breaker(Random())
        self._num_bad_reads = 0
        self.failure = ""
        """Why the device is unusable, for reads and writes; empty while it works."""
        self.num_blocks = 0
        self.num_bytes = 0

    @property
    def error(self) -> str:
        """Why the device is left alone for now; empty if it is not."""
        return self._breaker.error

    def may_ask(self, now: float) -> bool:
        """Return whether the disk may be read now; not while it is hung.

        A hung disk is tried now and then, as long as a thread is free: threads that wait for a
        device cannot be ended.
        """
        state = self._breaker.state(now)
        if self.failure or state == "open":
            return False
        return state == "closed" or self._num_reading() < self._reads_max

    def runs(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Run]:
        """Return which of `keys` the store has, as held by `NVME`."""
        packed = key_index.pack_keys(keys)
        return runs_of(NVME, {part: self._store.present(packed, part) for part in parts})

    def peer(self) -> Peer:
        """Return how fast the disk has been lately."""
        return self._rates.peer(NVME, time.monotonic())

    def tick(self) -> None:
        """Trust the disk again if all reads that hung have ended; called often."""
        if self._breaker.error and not self._num_reading():
            self._answers()

    async def promote(self, order: FetchOrder) -> FetchReport:
        """Read blocks into the arena; raises nothing: blocks that do not come are a miss."""
        began_s = time.monotonic()
        deadline = began_s + order.deadline_s
        num_blocks = num_bytes = 0
        error: KVRayError | None = None
        for span in order.spans:
            try:
                brought = await self._read(span, deadline)
            except KVRayError as reason:
                error = reason
                break
            except RuntimeError:  # it was closed meanwhile
                break
            num_blocks += brought.num_blocks
            num_bytes += brought.num_bytes
        seconds = time.monotonic() - began_s
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes
        report = SourceReport.of(
            error, num_blocks=num_blocks, num_bytes=num_bytes, seconds=seconds, transport=NVME
        )
        self._rates.note(NVME, report, now=time.monotonic())
        return FetchReport(
            here=tuple(self._here(span) for span in order.spans), sources={NVME: report}
        )

    def close(self) -> None:
        """End the threads; waits for the device. The store is closed already. Twice is fine."""
        self._readers.shutdown(cancel_futures=True)

    async def _read(self, span: Span, deadline: float) -> Brought:
        """Read a span in a thread; wait for it until the deadline, and not if it hangs.

        A late read raises TransferTimeout, a closed tier RuntimeError.
        """
        now = time.monotonic()
        if not self.may_ask(now):
            raise TransferTimeout(self.failure or self.error or f"{self._directory} is busy.")
        self._breaker.begin(now)
        read = self._readers.submit(self._promote, span, deadline)
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        work = asyncio.wrap_future(read)
        try:
            seen, stalls_at = self._promoter.num_pieces, now + _STALL_S
            while not work.done() and now < min(deadline, stalls_at):
                await asyncio.wait({work}, timeout=min(deadline, stalls_at) - now)
                now = time.monotonic()
                if seen != self._promoter.num_pieces:
                    seen, stalls_at = self._promoter.num_pieces, now + _STALL_S
        finally:
            # A read that has not begun never will; one that has goes on unheard.
            work.cancel()
        if not work.cancelled():
            return self._heard(work.result())
        if now >= stalls_at:
            self._hangs(now)
        raise TransferTimeout(f"{self._directory} did not give all blocks in time.")

    def _heard(self, brought: Brought) -> Brought:
        self._answers()
        is_bad = brought.num_unreadable and not brought.num_blocks
        self._num_bad_reads = self._num_bad_reads + 1 if is_bad else 0
        if self._num_bad_reads >= _BAD_READS_MAX:
            self.failure = (
                f"The device of {self._directory} refuses to read; look at it with `dmesg`."
            )
        return brought

    def _answers(self) -> None:
        if self._breaker.error:
            _log.warning("%s answers again", self._directory)
        self._breaker.succeed()

    def _hangs(self, now: float) -> None:
        if not self._breaker.error:
            _log.error("%s does not answer; it is left alone for now", self._directory)
        self._breaker.fail(
            now,
            f"{self._directory} does not answer: a read has hung for more than"
            f" {_STALL_S:.0f} s; look at the device with `dmesg`.",
        )

    def _num_reading(self) -> int:
        return sum(read.running() for read in list(self._reads))

    def _promote(self, span: Span, deadline: float) -> Brought:
        return self._promoter.promote(
            split_keys(span.keys),
            parent=BlockKey(span.parent) if span.parent else None,
            depth=span.depth,
            part=span.part,
            needs_parent=span.needs_parent,
            deadline=deadline,
        )

    def _here(self, span: Span) -> int:
        """Return how many leading blocks of a span are READY here."""
        (mask,) = self._arena.present(split_keys(span.keys), [span.part])
        return len(mask) if mask.all() else int(mask.argmin())
