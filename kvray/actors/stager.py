"""Brings blocks of other nodes and of this node's disk into its arena before they are promised.

All state belongs to the shard's event loop. What a decision rests on is read and acted upon
without an `await` in between; so no two fetches bring the same block. Nothing here waits for
another shard's stage, only for movers and the disk, which wait for nobody: two shards that stage
from each other cannot stop each other. Every wait ends with a deadline.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvray.actors.arguments import packed
from kvray.actors.flights import Flight, Flights, behind, head, spans_of
from kvray.actors.handovers import Handovers
from kvray.actors.nvme_tier import NvmeTier
from kvray.actors.orders import FetchOrder, FetchReport, Span
from kvray.actors.peers import Peers, mover_of
from kvray.actors.runs import merged
from kvray.actors.staging import (
    Mask,
    Reason,
    Run,
    StagingPlan,
    Wish,
    longest_prefix,
    plan_staging,
)
from kvray.arrival import NVME, Arrivals, arrivals_of
from kvray.block import BlockKey
from kvray.errors import KVRayError, ShardUnavailable
from kvray.store import Arena, Held, Wanted

_log = logging.getLogger("kvray.shard")

Spans = tuple[Span, ...]
Fetch = Callable[[FetchOrder], Awaitable[FetchReport]]

_STAGES_MAX = 128
"""Stages at once, those included that nobody waits for any more."""
_FRUITLESS_MAX = 3
"""Flights of one stage that may bring nothing before it is given up."""
_ROUSE_S = 3.0
"""How long another shard may take to bring blocks from its disk."""
_BUSY_S = 0.001
_CANCEL_S = 0.1
_JOINED_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
"""How long a stage waits for another one's flight before it looks whether its blocks are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSettings:
    """What staging needs to know, as plain values."""

    deadline_s: float = 10.0
    call_timeout_s: float = 1.0
    handover_s: float = 2.0
    fetches_max: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Blocks that are wanted here, and by whom."""

    keys: tuple[BlockKey, ...]
    readers: tuple[tuple[Wanted, ...], ...]
    """For each rank that reads here, the parts that its lease must have."""
    block_bytes: Mapping[int, int]
    """Part -> bytes of one block of it."""
    seconds_per_block: float = 0.0
    """What computing a block costs; 0: not known."""

    @property
    def wish(self) -> Wish:
        """The same for the planner."""
        return Wish(
            num_blocks=len(self.keys),
            wanted=tuple(dict.fromkeys(one for reader in self.readers for one in reader)),
            block_bytes=self.block_bytes,
            seconds_per_block=self.seconds_per_block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What is here when a stage answers; its blocks are kept for `handover_s`."""

    num_blocks: int
    reason: Reason
    """Why it is not more."""
    arrivals: Arrivals = field(default=(), compare=False)
    """How the blocks came, for people; nothing is decided by it."""


class Stager:
    """Stages prefixes; used by the shard's event loop alone."""

    def __init__(
        self,
        arena: Arena,
        peers: Peers,
        settings: StagingSettings,
        *,
        num_shards: Callable[[], int],
        nvme: NvmeTier | None = None,
    ) -> None:
        """Stage into `arena`.

        Args:
            arena: the shard's.
            peers: calls the others.
            settings: see there.
            num_shards: tells how many live shards there are, this one included; 0: the lookup
                does not say.
            nvme: the node's own blocks on disk, if it has any.
        """
        self.handovers = Handovers(arena)
        self._arena = arena
        self._peers = peers
        self._settings = settings
        self._num_shards = num_shards
        self._nvme = nvme
        self._flights = Flights()
        self._room = asyncio.Semaphore(settings.fetches_max)
        self._stages: set[asyncio.Task[Reason]] = set()
        self._departed: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._counts: Counter[str] = Counter()
        self._by_transport: dict[str, Counter[str]] = {}

    async def stage(self, prefix: Prefix, *, wait_s: float) -> Staged:
        """Have what is missing of `prefix` brought, and return what is here after `wait_s` at most.

        What is late goes on for `deadline_s` and is here for the next request.

        Raises:
            CapacityError, ShardUnavailable: the shard could not become a holder of its arena.
        """
        until = time.monotonic() + min(wait_s, self._settings.deadline_s)
        self._counts["stages"] += 1
        if len(self._stages) >= _STAGES_MAX:
            self._counts["refused"] += 1
            return Staged(num_blocks=0, reason="too_slow")
        flights: list[Flight] = []
        task = asyncio.get_running_loop().create_task(self._bring(prefix, flights))
        self._stages.add(task)
        task.add_done_callback(self._end_stage)
        # Not `wait_for`, which would cancel what is late.
        done, _ = await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        if task.cancelled():
            raise ShardUnavailable(f"{self._peers.shard} ends.")
        reason: Reason = "too_slow"
        if done:
            reason = "store_down" if task.exception() else task.result()
        else:
            self._counts["late"] += 1
        held = await self.lease(prefix, until=until)
        num_blocks = held.num_blocks if held is not None else 0
        return Staged(
            num_blocks=num_blocks,
            reason="none" if num_blocks == len(prefix.keys) else reason,
            arrivals=_arrivals(prefix.keys[:num_blocks], flights),
        )

    def num_here(self, prefix: Prefix) -> int:
        """Return how many leading blocks are here now."""
        return longest_prefix(prefix.wish, self._present(prefix))

    async def lease(self, prefix: Prefix, *, until: float) -> Held | None:
        """Keep what is here of `prefix` for `handover_s`; None if the arena is busy until then."""
        self._arena.join("shard")
        while True:
            held = self._arena.lease_for(prefix.keys, prefix.readers)
            now = time.monotonic()
            if held is not None:
                self.handovers.keep(held, until=now + self._settings.handover_s)
                return held
            if now + _BUSY_S > until:
                return None
            await asyncio.sleep(_BUSY_S)

    async def close(self) -> None:
        """End all stages and let go of what is held. Twice is fine."""
        self._is_closing = True
        while tasks := [*self._stages, *self._departed]:
            # More than once: before Python 3.12 a cancellation is lost if what is waited for has
            # just come.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_S)
        self.handovers.close()

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        return {
            **{
                name: self._counts[name]
                for name in (
                    "stages",
                    "joined",
                    "late",
                    "refused",
                    "staged_blocks",
                    "roused_blocks",
                )
            },
            "staged_bytes": self._counts["staged_bytes"],
            "corrupt_blocks": self._counts["corrupt_blocks"],
            "under_way": len(self._flights),
            "handovers": len(self.handovers),
            "transports": {name: dict(one) for name, one in list(self._by_transport.items())},
            "peers": self._peers.status(),
        }

    # -- one stage ----------------------------------------------------------------------------

    async def _bring(self, prefix: Prefix, flights: list[Flight]) -> Reason:
        """Bring what is missing of `prefix`; return why not all of it is here.

        Args:
            prefix: what is to be here.
            flights: those that bring it are put in there.
        """
        try:
            bringing = self._bring_in_turns(prefix, flights)
            return await asyncio.wait_for(bringing, self._settings.deadline_s)
        except asyncio.TimeoutError:
            return "too_slow"
        except ShardUnavailable:
            return "store_down"

    async def _bring_in_turns(self, prefix: Prefix, flights: list[Flight]) -> Reason:
        wish = prefix.wish
        runs: list[Run] | None = None
        obstacle: Reason = "not_stored"
        others: set[str] = set()
        failed: frozenset[str] = frozenset()
        fruitless = joins = 0
        # Looked at here, too: a cancellation may be lost, see `close`.
        until = time.monotonic() + self._settings.deadline_s
        while fruitless < _FRUITLESS_MAX and time.monotonic() < until and not self._is_closing:
            # From here to the flight's departure nothing is awaited: what is looked up stays so.
            here = self._present(prefix)
            if longest_prefix(wish, here) == wish.num_blocks:
                return "none"
            if runs is None:
                runs, obstacle = await self._locate(prefix)
                others = _others(runs, self._peers.shard)
                continue
            peers = self._peers.may_ask(others, without=failed)
            is_late = len(peers) < len(others)
            if self._nvme is not None and mover_of(NVME) not in failed:
                peers = {NVME: self._nvme.peer(), **peers}
            plan = plan_staging(wish, here, runs, peers)
            if not plan.pieces:
                if plan.reason != "not_stored":
                    return plan.reason
                # Some have more, but cannot be had now.
                return "too_slow" if is_late else obstacle
            before = self._flights.bringing(prefix.keys, plan.pieces)
            if before:
                self._counts["joined"] += not joins
                flights += [one for one in before if one not in flights]
                await _any_ended(before, _JOINED_S[min(joins, len(_JOINED_S) - 1)])
                joins += 1
                continue
            flight = self._depart(prefix, plan)
            flights.append(flight)
            await flight.ended.wait()
            if flight.report is None:
                return "store_down"  # its own mover, who would answer for the others
            if not flight.is_whole:
                # Who did not give all is not asked again, and the others may have changed too.
                fruitless += 1
                failed |= _lacking(flight)
                runs = None
        return "too_slow"

    async def _locate(self, prefix: Prefix) -> tuple[list[Run], Reason]:
        """Return who has what of `prefix`, and why others may have more."""
        parts = list(prefix.block_bytes)
        own = [] if self._nvme is None else self._nvme.runs(prefix.keys, parts)
        if self._num_shards() <= 1:
            return own, "not_stored" if self._num_shards() else "store_down"
        if not self._peers.can_fetch:
            return own, "store_down"
        try:
            return merged(own, await self._peers.locate(b"".join(prefix.keys))), "not_stored"
        except ShardUnavailable:
            return own, "store_down"

    def _present(self, prefix: Prefix) -> dict[int, Mask]:
        parts = list(prefix.block_bytes)
        return dict(zip(parts, self._arena.present(prefix.keys, parts), strict=True))

    def _end_stage(self, task: "asyncio.Task[Reason]") -> None:
        self._stages.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("a stage ended by a defect", exc_info=defect)

    # -- flights ------------------------------------------------------------------------------

    def _depart(self, prefix: Prefix, plan: StagingPlan) -> Flight:
        """Begin to bring the pieces of a plan; it goes on whatever becomes of its stage."""
        is_own = plan.pieces[0].shard == NVME
        # Those of disk and those of others one after the other: a child needs its parent.
        flight = Flight(
            prefix.keys,
            head([*takewhile(lambda piece: (piece.shard == NVME) == is_own, plan.pieces)]),
        )
        windowed = frozenset(part for part, window in prefix.wish.wanted if window is not None)
        spans = tuple(spans_of(prefix.keys, flight.pieces, windowed))
        self._flights.depart(flight)
        task = asyncio.get_running_loop().create_task(self._fly(flight, spans))
        self._departed.add(task)
        task.add_done_callback(lambda _: self._land(task, flight))
        return flight

    def _land(self, task: "asyncio.Task[None]", flight: Flight) -> None:
        """Let go of a flight that has ended, be it that its task was cancelled before it began."""
        self._departed.discard(task)
        self._flights.arrive(flight)
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("a fetch ended by a defect", exc_info=defect)

    async def _fly(self, flight: Flight, spans: Spans) -> None:
        until = time.monotonic() + self._settings.deadline_s
        try:
            if self._nvme is not None and flight.pieces[0].shard == NVME:
                # The disk has its own threads, and must not wait for a node that does not answer.
                await self._carry(flight, self._nvme.promote, spans, until)
                return
            async with self._room:
                await self._carry(flight, self._peers.fetch, spans, until)
                if await self._rouse(flight, spans, until):
                    await self._carry(flight, self._peers.fetch, spans, until)
        except KVRayError as error:
            _log.warning("%s: blocks could not be fetched: %s", self._peers.shard, error)

    async def _carry(self, flight: Flight, fetch: Fetch, spans: Spans, until: float) -> None:
        """Have one order carried out, if there is still time."""
        left_s = until - time.monotonic()
        if left_s > 0:
            flight.report = await fetch(FetchOrder(spans=spans, deadline_s=left_s))
            self._count(flight)

    async def _rouse(self, flight: Flight, spans: Spans, until: float) -> bool:
        """Have shards whose movers had not all bring what they have on disk into their memory.

        Returns:
            Whether it is worth asking their movers again.
        """
        if flight.report is None or flight.is_whole:
            return False
        missing: dict[str, list[Span]] = {}
        for piece, span, here in zip(flight.pieces, spans, flight.report.here, strict=False):
            source = flight.report.sources.get(mover_of(piece.shard))
            if here < piece.stop - piece.start and source is not None and source.error is None:
                missing.setdefault(piece.shard, []).append(behind(span, here))
        left_s = min(_ROUSE_S, max(0.0, until - time.monotonic()))
        calls = [
            self._peers.call(
                shard,
                "promote",
                *packed(FetchOrder(spans=tuple(theirs), deadline_s=left_s)),
                work_s=left_s,
            )
            for shard, theirs in missing.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        roused = sum(answer for answer in answers if isinstance(answer, int))
        self._counts["roused_blocks"] += roused
        return roused > 0

    def _count(self, flight: Flight) -> None:
        assert flight.report is not None, "it has just come"
        for source in flight.report.sources.values():
            self._counts["corrupt_blocks"] += source.corrupt
            if not source.num_blocks:
                continue
            counts = self._by_transport.setdefault(source.transport, Counter())
            counts["blocks"] += source.num_blocks
            counts["bytes"] += source.num_bytes
            self._counts["staged_blocks"] += source.num_blocks
            self._counts["staged_bytes"] += source.num_bytes


def _arrivals(keys: Sequence[BlockKey], flights: Sequence[Flight]) -> Arrivals:
    """Return how the blocks of a prefix came; those that no flight brought were here."""
    if not flights:
        return ()
    ways: list[tuple[str, str] | None] = [None] * len(keys)
    for flight in flights:
        for piece, transport in flight.landed(keys):
            source = "" if piece.shard == NVME else piece.shard
            ways[piece.start : piece.stop] = [(transport, source)] * (piece.stop - piece.start)
    return arrivals_of(ways)


def _others(runs: Sequence[Run], own: str) -> set[str]:
    """Return the shards in `runs` but the own one."""
    # There are few different sets of holders, however many runs.
    different = {id(holders): holders for _, holders in runs}
    return {shard for holders in different.values() for shard in holders} - {own, NVME}


def _lacking(flight: Flight) -> frozenset[str]:
    """Return the movers that have not given all that was asked of them."""
    assert flight.report is not None, "it has come"
    return frozenset(
        mover_of(piece.shard)
        for piece, here in zip(flight.pieces, flight.report.here, strict=False)
        if here < piece.stop - piece.start
    )


async def _any_ended(flights: Sequence[Flight], timeout_s: float) -> None:
    """Wait until one of `flights` has ended, but no longer than told."""
    waits = [asyncio.ensure_future(flight.ended.wait()) for flight in flights]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
