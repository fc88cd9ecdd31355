"""Carries out fetches: by the node's mover from other nodes, by its disk from here.

State of the shard's event loop. A fetch goes on whatever becomes of the stage that started it.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Protocol

from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.actors.ray_glue.arguments import packed
from kvray.actors.staging.peers import Peers, mover_of, shard_of
from kvray.actors.staging.plan import FetchStep, Peer, Prefix
from kvray.config import StagingConfig
from kvray.errors import KVRayError
from kvray.identity.block import BlockKey, head_number
from kvray.index import Run
from kvray.trace.arrival import HERE, NVME, Arrivals, arrivals_of
from kvray.trace.spans import past_span, traceparent

_log = logging.getLogger("kvray.shard")

FETCH_BLOCKS_MAX = 4096
"""Blocks of one fetch; more come in several fetches, one after the other."""
_PROMOTE_S = 3.0  # how long another shard may take to promote blocks from its disk


class LocalDisk(Protocol):
    """The blocks of this node that lie on its own disk."""

    def may_ask(self, now: float) -> bool:
        """Return whether the disk may be read from now."""

    def peer(self) -> Peer:
        """Return how fast the disk has been lately."""

    def runs(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Run]:
        """Return which of `keys` it has."""

    async def promote(self, order: FetchOrder) -> FetchReport:
        """Read blocks into the arena; those that do not come are a miss."""


class Fetch:
    """One order to the node's mover or disk, which stages may wait for."""

    def __init__(self, prefix: Prefix, steps: Sequence[FetchStep]) -> None:
        """Fetch `steps` of a prefix."""
        self.prefix = prefix
        self.steps = tuple(steps)
        self.blocks = [
            (prefix.keys[block], step.part)
            for step in steps
            for block in range(step.start, step.stop)
        ]
        self.task: asyncio.Task[None]
        """What carries it out, from its start on; it ends whatever becomes of the fetch."""
        self.report: FetchReport | None = None
        """None while it is under way, and if the mover did not answer."""

    def brought(self) -> Iterator[tuple[FetchStep, int]]:
        """Yield each step, and how many of its leading blocks are here by the report."""
        here = () if self.report is None else self.report.here
        return zip(self.steps, itertools.chain(here, itertools.repeat(0)), strict=False)

    def missing(self) -> list[FetchStep]:
        """Return the ends of steps that have not arrived, each from its first missing block on."""
        return [
            replace(step, start=step.start + num_here)
            for step, num_here in self.brought()
            if step.start + num_here < step.stop
        ]


class Fetcher:
    """The fetches of one shard."""

    def __init__(
        self,
        peers: Peers,
        nvme: Callable[[], LocalDisk | None],
        settings: StagingConfig,
        *,
        waiting_max: int,
    ) -> None:
        """At most `waiting_max` stages wait for one source."""
        self._peers = peers
        self._nvme = nvme
        self._deadline_s = settings.deadline_s
        self._room = asyncio.Semaphore(settings.fetches_max)
        self._waiting_max = waiting_max
        self._waiting: Counter[str] = Counter()  # source -> stages that wait for it
        self._by_block: dict[tuple[BlockKey, int], Fetch] = {}
        """Key and part -> the fetch in flight that brings it; no block is in two."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._by_transport: dict[str, Counter[str]] = {}

    def may_ask(self, others: set[str], failed: frozenset[str]) -> dict[str, Peer]:
        """Return the sources that may be asked now: the disk as `NVME`, and some shards.

        They are among the shards `others`. `failed` names movers that are not to be asked.
        """
        peers = self._peers.may_ask(others, without=failed)
        nvme = self._nvme()
        if nvme is not None and mover_of(NVME) not in failed and nvme.may_ask(time.monotonic()):
            peers = {NVME: nvme.peer(), **peers}
        return {name: one for name, one in peers.items() if self._waiting[name] < self._waiting_max}

    def covering(self, keys: Sequence[BlockKey], steps: Iterable[FetchStep]) -> list[Fetch]:
        """Return the fetches in flight that bring blocks of `steps`."""
        blocks = ((keys[at], one.part) for one in steps for at in range(one.start, one.stop))
        found = (self._by_block.get(block) for block in blocks)
        return list(dict.fromkeys(fetch for fetch in found if fetch is not None))

    async def wait(self, fetches: Sequence[Fetch], *, timeout_s: float | None = None) -> None:
        """Wait until one of `fetches` ends, and count as a stage that waits for their sources."""
        sources = {step.shard for fetch in fetches for step in fetch.steps}
        self._waiting.update(sources)
        try:
            tasks = {one.task for one in fetches}
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.subtract(sources)

    def start(self, prefix: Prefix, steps: Sequence[FetchStep]) -> Fetch:
        """Start to fetch `steps`, which one order takes (`first_steps`); no block is in flight."""
        fetch = Fetch(prefix, steps)
        self._by_block.update(dict.fromkeys(fetch.blocks, fetch))
        fetch.task = asyncio.get_running_loop().create_task(self._fetch(fetch))
        self.tasks.add(fetch.task)
        fetch.task.add_done_callback(lambda task: self._finish(task, fetch))
        return fetch

    def arrivals(self, fetches: Sequence[Fetch], keys: Sequence[BlockKey]) -> Arrivals:
        """Return how the blocks of a prefix, all here now, came by the `fetches` of a stage.

        Blocks in no fetch were here before. Without a report every step counts: its blocks may be
        committed before the mover says so. Then they count as brought by the transport by which
        their source gave blocks last, if it ever did.
        """
        ways: dict[BlockKey, tuple[str, str]] = {}
        for fetch in fetches:
            for step, num_here in fetch.brought():
                is_own = step.shard == NVME
                if fetch.report is None:
                    stop = step.stop
                    transport = NVME if is_own else self._peers.last_transport(step.shard) or HERE
                else:
                    stop = min(step.stop, step.start + num_here)
                    source = fetch.report.sources.get(NVME if is_own else mover_of(step.shard))
                    transport = source.transport if source is not None else ""
                if transport:
                    way = transport, "" if is_own else step.shard
                    ways.update(dict.fromkeys(fetch.prefix.keys[step.start : stop], way))
        return arrivals_of([ways.get(key) for key in keys]) if ways else ()

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        names = ("staged_blocks", "promoted_blocks", "staged_bytes", "corrupt_blocks")
        return {
            **{name: self._counts[name] for name in names},
            "under_way": len(self.tasks),
            "transports": {name: dict(one) for name, one in self._by_transport.copy().items()},
        }

    def _finish(self, task: "asyncio.Task[None]", fetch: Fetch) -> None:
        # As a callback of the task: one that is cancelled before it begins ends here too. It is the
        # first one, so whoever waits for the task finds the blocks in no fetch any more.
        self.tasks.discard(task)
        for block in fetch.blocks:
            self._by_block.pop(block, None)
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("a fetch ended by a defect", exc_info=defect)

    async def _fetch(self, fetch: Fetch) -> None:
        began, until = time.time(), time.monotonic() + self._deadline_s
        try:
            if fetch.steps[0].shard == NVME:
                # The disk has its own threads, and must not wait for a node that is silent.
                if (nvme := self._nvme()) is not None:
                    await self._order(fetch, nvme.promote, until)
                return
            async with self._room:
                if time.monotonic() < until:  # its whole time: no source is to blame for the wait
                    until = time.monotonic() + self._deadline_s
                await self._order(fetch, self._peers.fetch, until)
                if await self._promote_at_sources(fetch, until):
                    await self._order(fetch, self._peers.fetch, until)
        except KVRayError as error:
            about = {"kvray.shard": self._peers.shard}
            past_span("fetch", "", began, time.time(), about, error=type(error).__name__)
            _log.warning("%s: blocks could not be fetched: %s", self._peers.shard, error)

    async def _order(
        self,
        fetch: Fetch,
        carry_out: Callable[[FetchOrder], Awaitable[FetchReport]],
        until: float,
    ) -> None:
        left_s = until - time.monotonic()
        if left_s > 0:
            began = time.time()
            spans = _spans(fetch.prefix, fetch.steps)
            before = {} if fetch.report is None else fetch.report.sources
            report = await carry_out(FetchOrder(spans=spans, deadline_s=left_s))
            fetch.report = replace(report, sources=before | report.sources)
            self._note(report, began)

    async def _promote_at_sources(self, fetch: Fetch, until: float) -> bool:
        """Have shards promote what their movers lacked; True: the movers are worth a new order."""
        if fetch.report is None:
            return False
        missing: dict[str, list[Span]] = {}
        steps = fetch.missing()
        for step, span in zip(steps, _spans(fetch.prefix, steps), strict=True):
            source = fetch.report.sources.get(span.source)
            if source is not None and source.error is None:
                # Without their parents, which are here: the source may not have those.
                missing.setdefault(step.shard, []).append(replace(span, needs_parent=False))
        left_s = min(_PROMOTE_S, max(0.0, until - time.monotonic()))
        calls = [
            self._peers.call(
                shard,
                "promote",
                traceparent(),
                *packed(FetchOrder(spans=tuple(theirs), deadline_s=left_s)),
                work_s=left_s,
            )
            for shard, theirs in missing.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        promoted = sum(answer for answer in answers if isinstance(answer, int))
        self._counts["promoted_blocks"] += promoted
        return promoted > 0

    def _note(self, report: FetchReport, began: float) -> None:
        """Count what came, and make a span for each source; the mover asks them all at once."""
        ended = time.time()
        for name, source in report.sources.items():
            is_own = name == NVME
            about = {
                "kvray.shard": self._peers.shard,
                "kvray.source": self._peers.shard if is_own else shard_of(name),
                "kvray.tier": "nvme" if is_own else "host",
                "kvray.transport": source.transport,
                "kvray.blocks": source.num_blocks,
                "kvray.bytes": source.num_bytes,
            }
            over = min(ended, began + source.seconds) if source.seconds else ended
            past_span("fetch", "", began, over, about, error=source.error or "")
            self._counts["corrupt_blocks"] += source.corrupt
            if source.num_blocks:
                counts = self._by_transport.setdefault(source.transport, Counter())
                counts.update(blocks=source.num_blocks, bytes=source.num_bytes)
                self._counts.update(staged_blocks=source.num_blocks, staged_bytes=source.num_bytes)


def first_steps(steps: Sequence[FetchStep]) -> list[FetchStep]:
    """Return the first of `steps`, as many as one fetch takes."""
    is_own = steps[0].shard == NVME
    # Disk and mover work one after the other: a child needs its parent.
    alike = takewhile(lambda step: (step.shard == NVME) == is_own, steps)
    taken, room = [], FETCH_BLOCKS_MAX
    for step in alike:
        if room <= 0:
            break
        taken.append(replace(step, stop=min(step.stop, step.start + room)))
        room -= step.stop - step.start
    return taken


def _spans(prefix: Prefix, steps: Sequence[FetchStep]) -> tuple[Span, ...]:
    """Return steps of a prefix as the mover takes them."""
    keys, windowed = prefix.keys, prefix.windowed
    return tuple(
        Span(
            source=mover_of(step.shard),
            part=step.part,
            keys=b"".join(keys[step.start : step.stop]),
            parent=keys[step.start - 1] if step.start else b"",
            depth=step.start,
            head=head_number(keys[0]),
            needs_parent=step.start > 0 and step.part not in windowed,
            block_bytes=prefix.block_bytes[step.part],
            namespace=prefix.namespace,
        )
        for step in steps
    )
