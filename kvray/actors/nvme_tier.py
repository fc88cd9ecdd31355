"""A shard's NVMe tier: writes in the background, reads for stages, is flushed at the end.

The event loop only asks what is there and hands work to threads: one that writes, one thing after
the other, and some that read. What they share with the rest is the arena and the store, both of
which may be used from any thread.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvray.actors.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.rates import Rates
from kvray.actors.runs import runs_of
from kvray.actors.staging import Peer, Run
from kvray.arrival import NVME
from kvray.block import BlockKey, split_keys
from kvray.errors import KVRayError, TierError
from kvray.store import Arena, departures, key_index
from kvray.store.departures import Departures
from kvray.store.figures import by_namespace
from kvray.store.layout import READY
from kvray.store.nvme import NvmeSpec, NvmeStore
from kvray.store.nvme.budget import WriteBudget
from kvray.store.nvme.demoter import Demoter, Progress
from kvray.store.nvme.promoter import Promoter
from kvray.store.retention import Retention

_log = logging.getLogger("kvray.shard")

_IDLE_S = 0.25
"""How long after nothing was to be written it is looked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSettings:
    """What an NVMe tier needs to know, as plain values."""

    directory: Path
    spec: NvmeSpec
    high_watermark: float
    bytes_per_day: float | None
    flush_s: float
    reads_max: int


class NvmeTier:
    """Between an arena and a store; used by the shard's event loop, but for what says otherwise."""

    def __init__(
        self, arena: Arena, retention: Retention, settings: NvmeSettings, gone: Departures
    ) -> None:
        """Open the store and find what is in it: from a thread, for it waits for the device.

        Args:
            arena: whose blocks are kept.
            retention: says which of them leave it next, and are worth it.
            settings: see there.
            gone: remembers what has left.

        Raises:
            CapacityError, TierError: the device has no room, or failed.
            ConfigError: the directory or the sizes cannot be used.
            ShardUnavailable: another process has the directory, or the arena stays locked.
        """
        began_s = time.monotonic()
        arena.join("shard")
        self._arena = arena
        self._settings = settings
        self._retention = retention
        self._departures = gone
        self.store = NvmeStore(settings.directory, settings.spec)
        """Open until `close`."""
        retention.put_below(self.store)
        self._recovery_s = time.monotonic() - began_s
        self._budget = WriteBudget(settings.bytes_per_day, now=time.time())
        self._budget.load(settings.directory)
        self._demoter = Demoter(
            arena,
            self.store,
            high_watermark=settings.high_watermark,
            budget=self._budget,
            retention=retention,
        )
        self._promoter = Promoter(arena, self.store, retention.promoted)
        self._rates = Rates()
        self._writer = ThreadPoolExecutor(1, "kvray-demote")
        self._readers = ThreadPoolExecutor(settings.reads_max, "kvray-promote")
        self._writing: Future[int] | None = None
        self._look_at = 0.0
        self._failure = self._said = ""
        self._promoted_blocks = 0
        self._promoted_bytes = 0

    # -- what is there ------------------------------------------------------------------------

    @property
    def may_have_blocks(self) -> bool:
        """Whether there is, or was, anything to be had."""
        return bool(self.store.report.blocks or self._demoter.counts.demoted_blocks)

    def runs(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Run]:
        """Return what is there of `keys`, as held by `NVME`."""
        packed = key_index.pack_keys(keys)
        return runs_of(NVME, {part: self.store.present(packed, part) for part in parts})

    def peer(self) -> Peer:
        """Return how fast blocks came from there lately."""
        way = self._rates.of(NVME, time.monotonic())
        if way is None:
            return Peer()
        return Peer(latency_s=way.latency_s, bytes_per_s=way.bytes_per_s)

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        return {
            "directory": str(self._settings.directory),
            "capacity_bytes": self._settings.spec.capacity,
            **asdict(self.store.stats()),
            "namespaces": by_namespace(self.store.tables),
            **asdict(self._demoter.counts),
            "promoted_blocks": self._promoted_blocks,
            "promoted_bytes": self._promoted_bytes,
            "write_budget_bytes": self._budget.available(time.time()),
            "recovered_blocks": self.store.report.blocks,
            "recovery_s": self._recovery_s,
            "message": self._failure,
        }

    # -- reading ------------------------------------------------------------------------------

    async def promote(self, order: FetchOrder) -> FetchReport:
        """Bring blocks into the arena; raises nothing: what does not come is a miss."""
        began_s = time.monotonic()
        deadline = began_s + order.deadline_s
        loop = asyncio.get_running_loop()
        num_blocks = num_bytes = 0
        error: KVRayError | None = None
        for span in order.spans:
            try:
                work = loop.run_in_executor(self._readers, self._promote, span, deadline)
                blocks, size = await work
            except KVRayError as reason:
                error = reason
                break
            except RuntimeError:  # it was closed meanwhile
                break
            num_blocks, num_bytes = num_blocks + blocks, num_bytes + size
        seconds = time.monotonic() - began_s
        self._promoted_blocks += num_blocks
        self._promoted_bytes += num_bytes
        self._rates.note(NVME, NVME, num_bytes=num_bytes, seconds=seconds, now=time.monotonic())
        report = SourceReport(
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            seconds=seconds,
            transport=NVME,
            error=type(error).__name__ if error else None,
            message=str(error or ""),
        )
        return FetchReport(
            here=tuple(self._here(span) for span in order.spans), sources={NVME: report}
        )

    def _promote(self, span: Span, deadline: float) -> tuple[int, int]:
        brought = self._promoter.promote(
            split_keys(span.keys),
            parent=BlockKey(span.parent) if span.parent else None,
            depth=span.depth,
            part=span.part,
            needs_parent=span.needs_parent,
            deadline=deadline,
        )
        return brought.num_blocks, brought.num_bytes

    def _here(self, span: Span) -> int:
        """Return how many leading blocks of a span are READY here."""
        (mask,) = self._arena.present(split_keys(span.keys), [span.part])
        return len(mask) if mask.all() else int(mask.argmin())

    # -- writing ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Go on writing what is to leave the arena next; called often."""
        if self._writing is not None:
            if not self._writing.done():
                return
            self._look_at = now if self._take(self._writing) else now + _IDLE_S
            self._writing = None
        if now >= self._look_at and not self._failure:
            self._writing = self._writer.submit(self._demoter.demote_ahead)

    async def flush(self, progress: Progress) -> None:
        """Write what is not there yet, the last used first, for `flush_s` at most."""
        until = time.monotonic() + self._settings.flush_s
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(self._writer, self._flush, until, progress)
            written = await work
        except (KVRayError, RuntimeError) as error:
            _log.error("The NVMe tier could not be flushed: %s", error)
        else:
            _log.info("Flushed %d blocks to %s", written, self._settings.directory)

    def _flush(self, until: float, progress: Progress) -> int:
        return self._demoter.flush(until=until, progress=progress)

    def clear(self) -> int:
        """Let go of every block, for good; return how many. From any thread but the loop's.

        Raises:
            TierError: the device failed.
        """
        tables = self.store.tables
        cleared = self.store.evict(np.flatnonzero(tables.slot_state == READY))
        words = tables.slot_key[cleared, 0]
        self._departures.note(words, departures.NVME, departures.CLEARED, now=time.time())
        self._retention.evicted_below(cleared)
        self.store.flush()
        return len(cleared)

    def _take(self, writing: "Future[int]") -> int:
        """Return how many blocks a round has written; note why there will be none after it."""
        error = writing.exception()
        if error is None:
            return writing.result()
        if not isinstance(error, KVRayError):
            raise error
        if isinstance(error, TierError):
            self._failure = str(error)
        if str(error) != self._said:  # once, however often it is tried
            self._said = str(error)
            _log.error("Blocks could not be written to the NVMe tier: %s", error)
        return 0

    def close(self) -> None:
        """End reads and writes, and close the store: from a thread. Twice is fine."""
        self._writer.shutdown(cancel_futures=True)
        with contextlib.suppress(KVRayError):
            self._demoter.close()
        self.store.close()  # reads that are under way end with their piece
        self._readers.shutdown(cancel_futures=True)
