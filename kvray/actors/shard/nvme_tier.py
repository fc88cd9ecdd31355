"""A shard's NVMe tier: writes in the background, reads for stages, is flushed at the end.

The event loop asks what the store has and hands work to threads: one that writes, and those of
`NvmeReads`. They share the arena and the store with it, and any thread may use both.

`NvmeReads` is used by the shard's event loop. Each read runs in a thread, to which the promoter
crosses; nobody waits for one that hangs.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.staging.peers import Rate
from kvray.actors.staging.plan import Peer, runs_of
from kvray.breaker import Breaker
from kvray.config import exact_size, format_size
from kvray.errors import KVRayError, TierError, TransferTimeout
from kvray.identity.block import BlockKey, split_keys
from kvray.index import Run
from kvray.store import Arena, block_history
from kvray.store.arena import key_index
from kvray.store.arena.layout import READY
from kvray.store.arena.mapped import by_namespace
from kvray.store.block_history import BlockHistory
from kvray.store.demoter import Brought, Demoter, Progress, Promoted, Promoter
from kvray.store.nvme import NvmeSpec, NvmeStore
from kvray.store.nvme.disk import device_errors
from kvray.store.nvme.record import SegmentShape
from kvray.store.nvme.terms import WriteBudget
from kvray.store.retention import Retention
from kvray.trace.arrival import NVME

_log = logging.getLogger("kvray.shard")

_IDLE_S = 0.25  # how long after a round without writes the next one begins
_HUNG_S = 10.0  # the disk counts as hung when a write lasts this long
_STALL_S = 2.0
"""The device counts as hung when reads are under way and none ends for this long."""
_BAD_READS_MAX = 3
"""The device counts as failed after it refuses this many reads in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSettings:
    """The settings of an NVMe tier, as plain values."""

    directory: Path
    spec: NvmeSpec
    high_watermark: float
    bytes_per_day: float | None
    flush_s: float
    reads_max: int


class NvmeReads:
    """Reads blocks of one store into the arena."""

    def __init__(
        self, arena: Arena, store: NvmeStore, promoted: Promoted, settings: NvmeSettings
    ) -> None:
        """Read at most `reads_max` spans at once."""
        self._arena = arena
        self._store = store
        self._promoter = Promoter(arena, store, promoted)
        self._directory = settings.directory
        self._reads_max = settings.reads_max
        self._readers = ThreadPoolExecutor(settings.reads_max, "kvray-promote")
        self._reads: set[Future[Brought]] = set()
        self._rate = Rate()
        self.breaker = Breaker(Random())
        """Its error says why the device is left alone for now."""
        self._num_bad_reads = 0
        self.failure = ""
        """Why the device is unusable, for reads and writes; empty while it works."""
        self.num_blocks = 0
        self.num_bytes = 0

    def may_ask(self, now: float) -> bool:
        """Return whether the disk may be read now; not while it is hung.

        A hung disk is tried now and then, as long as a thread is free: threads that wait for a
        device cannot be ended.
        """
        state = self.breaker.state(now)
        if self.failure or state == "open":
            return False
        return state == "closed" or self._num_reading() < self._reads_max

    def runs(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Run]:
        """Return which of `keys` the store has, as held by `NVME`."""
        packed = key_index.pack_keys(keys)
        return runs_of(NVME, {part: self._store.present(packed, part) for part in parts})

    def peer(self) -> Peer:
        """Return how fast the disk has been lately."""
        return self._rate.peer(time.monotonic())

    def tick(self) -> None:
        """Trust the disk again if all reads that hung have ended; called often."""
        if self.breaker.error and not self._num_reading():
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
        self._rate.note(report, now=time.monotonic())
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
            raise TransferTimeout(
                self.failure or self.breaker.error or f"{self._directory} is busy."
            )
        self.breaker.begin(now)
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
        if self.breaker.error:
            _log.warning("%s answers again", self._directory)
        self.breaker.succeed()

    def _hangs(self, now: float) -> None:
        if not self.breaker.error:
            _log.error("%s does not answer; it is left alone for now", self._directory)
        self.breaker.fail(
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


class NvmeTier:
    """Stands between an arena and a store; used by the shard's event loop unless said otherwise."""

    def __init__(
        self, arena: Arena, retention: Retention, settings: NvmeSettings, gone: BlockHistory
    ) -> None:
        """Open the store and recover its blocks: from a thread, as it waits for the device.

        Raises as `NvmeStore`; ShardUnavailable also if the arena stays locked.
        """
        began_s = time.monotonic()
        arena.join("shard")
        self._arena = arena
        self._settings = settings
        self._retention = retention
        self._history = gone
        self.store = NvmeStore(settings.directory, settings.spec)  # open until `close`
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.store.close)
            with device_errors(settings.directory, "looked at"):
                self._remarks = tuple(_remarks(settings))
            self._budget = WriteBudget(settings.bytes_per_day, now=time.time())
            self._budget.load(settings.directory)
            on_failure.pop_all()
        retention.put_below(self.store)
        self._recovery_s = time.monotonic() - began_s
        self._demoter = Demoter(
            arena,
            self.store,
            high_watermark=settings.high_watermark,
            budget=self._budget,
            retention=retention,
        )
        self.reads = NvmeReads(arena, self.store, retention.promoted, settings)
        self._writer = ThreadPoolExecutor(1, "kvray-demote")
        self._writing: Future[int] | None = None
        self._writing_since = 0.0
        self._look_at = 0.0

    @property
    def may_have_blocks(self) -> bool:
        """Whether it has, or had, any blocks."""
        return bool(self.store.report.blocks or self._demoter.counts.demoted_blocks)

    def status(self) -> dict[str, Any]:
        """Return figures for people, beside those of `NvmeDisk.status`; from any thread."""
        return {
            **asdict(self.store.stats()),
            "namespaces": by_namespace(self.store.tables),
            **asdict(self._demoter.counts),
            "promoted_blocks": self.reads.num_blocks,
            "promoted_bytes": self.reads.num_bytes,
            "write_budget_bytes": self._budget.available(time.time()),
            "recovered_blocks": self.store.report.blocks,
            "recovery_s": self._recovery_s,
            "message": self._message(time.monotonic()),
            "remarks": list(self._remarks),
        }

    def _message(self, now: float) -> str:
        if reason := self.reads.failure or self.reads.breaker.error:
            return reason
        writing, for_s = self._writing, now - self._writing_since
        if writing is None or writing.done() or for_s < _HUNG_S:
            return ""
        return f"{self._settings.directory} has not answered a write for {for_s:.0f} s."

    def tick(self, now: float) -> None:
        """Go on writing the blocks that leave the arena next; called often."""
        self.reads.tick()
        if self._writing is not None:
            if not self._writing.done():
                return
            ended, self._writing = self._writing, None
            self._look_at = now if self._take(ended) else now + _IDLE_S
        if now >= self._look_at and not self.reads.failure:
            self._writing = self._writer.submit(self._demoter.demote_ahead)
            self._writing_since = now

    async def flush(self, progress: Progress) -> None:
        """Write the blocks that it lacks, the last used first, for `flush_s` at most.

        A disk that stands still for `_HUNG_S` is given up.
        """
        if self.reads.failure:
            return
        until = time.monotonic() + self._settings.flush_s
        counts, seen = self._demoter.counts, -1
        try:
            flush = partial(self._demoter.flush, until=until, progress=progress)
            work = asyncio.wrap_future(self._writer.submit(flush))
            while not work.done() and seen != counts.demoted_bytes:
                seen = counts.demoted_bytes
                await asyncio.wait({work}, timeout=_HUNG_S)
            if work.done():
                _log.info("Flushed %d blocks to %s", work.result(), self._settings.directory)
            else:
                work.cancel()
                _log.error("%s does not answer; it is not flushed", self._settings.directory)
        except (KVRayError, RuntimeError) as error:
            _log.error("The NVMe tier could not be flushed: %s", str(error))

    def clear(self, timeout_s: float) -> int:
        """Evict every block; return how many. From any thread but the loop's.

        TierError: the device failed, or did not answer within `timeout_s`.
        """
        try:
            work = self._writer.submit(self._clear)
        except RuntimeError:  # closed meanwhile
            return 0
        try:
            return work.result(timeout_s)
        except FutureTimeoutError:
            work.cancel()
            raise TierError(
                f"{self._settings.directory} does not answer; look at the device with `dmesg`."
            ) from None

    def _clear(self) -> int:
        tables = self.store.tables
        cleared = self.store.evict(tables.slots_in(READY))
        words = tables.slot_key[cleared, 0]
        self._history.note(words, block_history.NVME, block_history.CLEARED, now=time.time())
        self._retention.evicted_below(cleared)
        self.store.flush()
        return len(cleared)

    def _take(self, writing: "Future[int]") -> int:
        """Return how many blocks a round has written; note an error that ends all writing."""
        error = writing.exception()
        if error is None:
            return writing.result()
        if not isinstance(error, KVRayError):
            raise error
        if isinstance(error, TierError):
            self.reads.failure = str(error)  # a device that refuses writes is not read either
        # As text: the error's traceback would keep the arena mapped.
        _log.error("Blocks could not be written to the NVMe tier: %s", str(error))
        return 0

    def close(self) -> None:
        """End reads and writes, and close the store: from a thread, as it waits for the device."""
        self._writer.shutdown(cancel_futures=True)
        with contextlib.suppress(KVRayError):
            self._demoter.close()
        self.store.close()  # reads under way end with their piece
        self.reads.close()


def _remarks(settings: NvmeSettings) -> Iterator[str]:
    """Yield what works about the place of the files, but is hardly intended."""
    where, spec = settings.directory, settings.spec
    found = os.statvfs(where)
    size = found.f_blocks * found.f_frsize
    if spec.free_reserve + SegmentShape.of(spec.geometry(), spec.slot_min).file_bytes > size:
        yield (
            f"nvme.free_reserve ({exact_size(spec.free_reserve)}) leaves no room for one segment on"
            f" the file system of {where}, which has {format_size(size)}, so nothing is ever"
            " written there; lower nvme.free_reserve."
        )
    if os.stat(where).st_dev == os.stat("/").st_dev:
        yield (
            f"{where} is on the root file system, and not on a disk of its own; mount one at"
            " nvme.dir, unless that is meant."
        )
