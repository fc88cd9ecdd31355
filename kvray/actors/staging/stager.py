"""Stages prefixes: has blocks of other nodes and of this node's disk in its arena before a promise.

A stage is one task with one deadline: it looks what is here, plans, has the plan brought, and looks
again. It waits for the lookup and for fetches, which wait for nobody, and never for another shard's
stage: two shards that stage from each other cannot stop each other. Who asked for it waits as long
as he likes, and then keeps what has come. The stage goes on, for the next request. Fetches belong
to all stages that want their blocks, and go on whatever becomes of those.

All state belongs to the shard's event loop. No `await` stands between reading what a decision rests
on and acting on it, so no two fetches bring the same block. A long prefix of many parts is looked
at in pieces, between which others have their turn. Nothing that it found is taken for true after
that: blocks are looked for again before they are fetched.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvray.actors.lookup.delta import partition_of
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.fetcher import Fetch, Fetcher, LocalDisk, first_steps
from kvray.actors.staging.peers import Peers, mover_of
from kvray.actors.staging.plan import (
    FetchStep,
    Mask,
    Peer,
    Prefix,
    longest_prefix,
    merged,
    plan_staging,
)
from kvray.config import StagingConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.index import Run
from kvray.store import Arena, Held, Lease, PartRequest
from kvray.trace.arrival import NVME, Arrivals
from kvray.trace.reasons import StageReason
from kvray.trace.spans import fail, span

_COUNTED = ("stages", "joined", "late", "refused")

_log = logging.getLogger("kvray.shard")

_STAGES_MAX = 128  # stages at once, with those that nobody waits for now
_WAITING_MAX = _STAGES_MAX // 2
"""Stages that may wait for one source: one that hangs leaves room for the others."""
_HANDOVERS_MAX = 256
_FRUITLESS_MAX = 3  # incomplete fetches after which a stage is given up
_PIECE = 8192
"""Blocks of all parts that are looked for in one go, for some milliseconds."""
_BUSY_S = 0.001
_JOINED_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
"""How long a stage waits for another one's fetch before it checks whether its blocks are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The answer of a stage; its blocks are kept for `handover_s`."""

    num_blocks: int
    """Leading blocks that are here."""
    reason: StageReason
    """Why there are no more."""
    arrivals: Arrivals = field(default=(), compare=False)
    """How the blocks came, for people; nothing is decided by it."""
    leases: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    """Of ranks on other nodes, see `RankLeases.lease`."""


class Handovers:
    """The shard's own leases on staged blocks, until the asking engine has its own.

    Each ends at its time; of too many the oldest ends earlier. Its blocks are then as likely to
    stay as any that were just used.
    """

    def __init__(self, arena: Arena, *, handover_s: float) -> None:
        self._arena = arena
        self._handover_s = handover_s
        self._held: deque[tuple[float, tuple[Lease, ...]]] = deque()

    def __len__(self) -> int:
        """Return how many prefixes are held."""
        return len(self._held)

    def keep(self, held: Held) -> None:
        """Take over the leases of a prefix and hold them for `handover_s`."""
        if held.leases:
            self._held.append((time.monotonic() + self._handover_s, held.leases))
        while len(self._held) > _HANDOVERS_MAX and self._release_oldest():
            pass

    def expire(self, now: float) -> None:
        """Release the leases whose time is over; if the arena is busy, the next time.

        At the end all of them, as far as it is not busy; the others end with this process.
        """
        while self._held and self._held[0][0] <= now and self._release_oldest():
            pass

    def _release_oldest(self) -> bool:
        released = self._arena.release(*self._held[0][1])
        if released:
            self._held.popleft()
        return released


class Stager:
    """Stages prefixes; used by the shard's event loop alone."""

    def __init__(
        self,
        arena: Arena,
        peers: Peers,
        settings: StagingConfig,
        *,
        num_shards: Callable[[], int],
        num_partitions: int = 1,
        nvme: Callable[[], LocalDisk | None] = lambda: None,
    ) -> None:
        """Stage from the shards that the lookup names, which has `num_partitions`.

        `num_shards` counts the live shards, this one too; 0: the lookup does not answer.
        """
        self.handovers = Handovers(arena, handover_s=settings.handover_s)
        self._arena = arena
        self._peers = peers
        self._settings = settings
        self._num_shards = num_shards
        self._num_partitions = num_partitions
        self._nvme = nvme
        self._fetcher = Fetcher(peers, nvme, settings, waiting_max=_WAITING_MAX)
        self._stages: set[asyncio.Task[StageReason]] = set()
        """Those included that nobody waits for now."""
        self._is_closing = False
        self._counts: Counter[str] = Counter()

    async def stage(self, prefix: Prefix, *, until: float) -> Staged:
        """Have the missing blocks of `prefix` brought; return what is here by then, and keep it.

        The wait is `deadline_s` at most. What is late goes on that long; its blocks are here for
        the next request.

        Raises:
            CapacityError, ShardUnavailable: the shard ends, or could not become a holder of its
                arena.
        """
        self._require_open()
        self._counts["stages"] += 1
        if len(self._stages) >= _STAGES_MAX:
            self._counts["refused"] += 1
            return Staged(num_blocks=0, reason="too_slow")
        now, loop = time.monotonic(), asyncio.get_running_loop()
        until = min(until, now + self._settings.deadline_s)
        fetches: list[Fetch] = []
        work = loop.create_task(self._bring(prefix, fetches))
        # As `asyncio.timeout`, which Python 3.10 lacks: nothing that it awaits loses this.
        deadline = loop.call_later(self._settings.deadline_s, work.cancel)
        self._stages.add(work)
        work.add_done_callback(lambda _: self._end(work, deadline))
        await asyncio.wait({work}, timeout=max(0.0, until - now))
        reason: StageReason = "too_slow"
        if not work.done() or work.cancelled():
            self._counts["late"] += 1
        else:  # whatever failed, the engine gets what is here
            reason = work.result() if work.exception() is None else "store_down"
        num_blocks = await self._keep(prefix, until=until)
        return Staged(
            num_blocks=num_blocks,
            reason="none" if num_blocks == len(prefix.keys) else reason,
            arrivals=self._fetcher.arrivals(fetches, prefix.keys[:num_blocks]),
        )

    async def num_here(self, prefix: Prefix) -> int:
        """Return how many leading blocks are here."""
        return longest_prefix(prefix, await self._present(prefix))

    def ways(self) -> tuple[Peer | None, dict[str, Peer]]:
        """Return this node's disk, if it has one, and the shards that gave it blocks: how fast."""
        nvme = self._nvme()
        return None if nvme is None else nvme.peer(), self._peers.measured()

    def _require_open(self) -> None:
        if self._is_closing:
            raise ShardUnavailable(f"{self._peers.shard} ends.")

    async def _keep(self, prefix: Prefix, *, until: float) -> int:
        """Keep the blocks of `prefix` for `handover_s`.

        Returns how many leading blocks; 0 if the arena is busy until then.
        """
        self._require_open()
        self._arena.join("shard")
        if not _is_large(prefix):
            return await self._lease(prefix.keys, prefix.readers, until)
        # Part by part, each as far as the one before it: a window ends with the prefix.
        num_blocks, in_a_row = longest_prefix(prefix, await self._present(prefix)), 0
        for one in itertools.cycle(prefix.parts):
            if not num_blocks or in_a_row == len(prefix.parts):
                break
            found = await self._lease(prefix.keys[:num_blocks], [[one]], until)
            in_a_row = in_a_row + 1 if found == num_blocks else 1
            num_blocks = found
            await asyncio.sleep(0)
        return num_blocks

    async def _lease(
        self, keys: Sequence[BlockKey], readers: Sequence[Sequence[PartRequest]], until: float
    ) -> int:
        while (held := self._arena.lease_for(keys, readers)) is None:
            if time.monotonic() + _BUSY_S > until:
                return 0
            await asyncio.sleep(_BUSY_S)
        self.handovers.keep(held)
        return held.num_blocks

    async def close(self) -> None:
        """End all stages and fetches, and let go of what is held. Twice is fine."""
        self._is_closing = True
        while tasks := self._stages | self._fetcher.tasks:
            # Again and again: before Python 3.12 `asyncio.wait_for`, which calls of actors use,
            # loses a cancellation if what it awaits has just finished.
            for task in tasks:
                task.cancel()
            await asyncio.sleep(_BUSY_S)
        self.handovers.expire(float("inf"))

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        return {
            **{name: self._counts[name] for name in _COUNTED},
            **self._fetcher.status(),
            "handovers": len(self.handovers),
            "peers": self._peers.status(),
        }

    def _end(self, work: "asyncio.Task[StageReason]", deadline: asyncio.TimerHandle) -> None:
        deadline.cancel()
        self._stages.discard(work)
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, ShardUnavailable):
            _log.error("a stage ended by a defect", exc_info=error)

    async def _bring(self, prefix: Prefix, fetches: list[Fetch]) -> StageReason:
        """Bring the missing blocks of `prefix`; return why not all of them are here.

        Adds to `fetches` those that bring blocks of it, its own and those of others that it joins.
        """
        runs, failed, fruitless, joins = None, frozenset[str](), 0, 0
        obstacle: StageReason = "not_stored"
        while fruitless < _FRUITLESS_MAX:
            here = await self._present(prefix)
            if longest_prefix(prefix, here) == prefix.num_blocks:
                return "none"
            if runs is None:
                runs, obstacle = await self._locate(prefix)
                continue  # look again: blocks may have come meanwhile
            others = _others(runs, self._peers.shard)
            peers = self._fetcher.may_ask(others, failed)
            plan = plan_staging(prefix, here, runs, peers)
            if not plan.steps:
                if plan.reason != "not_stored":
                    return plan.reason
                # Sources that cannot be asked now may have more.
                has_own = any(NVME in run.holders for run in runs)
                return "too_slow" if len(peers) < len(others) + has_own else obstacle
            # No `await` from here to the start of the fetch: what is read stays true.
            steps = first_steps(plan.steps)
            if _is_large(prefix) and self._has_any(prefix, steps):
                continue  # they came while the others were looked for
            if before := self._fetcher.covering(prefix.keys, steps):
                self._counts["joined"] += not joins
                fetches += [one for one in before if one not in fetches]
                wait_s = _JOINED_S[min(joins, len(_JOINED_S) - 1)]
                joins += 1
                with span("fetch", {"kvray.joined": True}):
                    await self._fetcher.wait(before, timeout_s=wait_s)
                continue
            fetch = self._fetcher.start(prefix, steps)
            fetches.append(fetch)
            await self._fetcher.wait([fetch])
            if fetch.report is None:
                return "store_down"  # the node's own mover, which every other source needs too
            if missing := fetch.missing():
                # Do not ask the sources that lacked blocks again; others may have changed too.
                fruitless += 1
                failed |= {mover_of(step.shard) for step in missing}
                runs = None
        return "too_slow"

    async def _locate(self, prefix: Prefix) -> tuple[list[Run], StageReason]:
        """Return the holders of `prefix`, and why there may be more of it than they have."""
        obstacle: StageReason = "not_stored"
        with span("lookup", {"kvray.shard": self._peers.shard}) as made:
            nvme = self._nvme()
            parts = list(prefix.block_bytes)
            runs = [] if nvme is None else await _runs_on_disk(nvme, prefix.keys, parts)
            num_shards = self._num_shards()
            if num_shards > 1 and self._peers.can_fetch:
                lookup = lookup_name(partition_of(prefix.keys[0], self._num_partitions))
                try:
                    found = await self._peers.call(
                        lookup, "locate", *in_pieces(b"".join(prefix.keys))
                    )
                    runs = merged(runs, found)
                except ShardUnavailable:
                    obstacle = "store_down"
            elif num_shards != 1:
                obstacle = "store_down"
            made.set_attribute("kvray.blocks.asked", len(prefix.keys))
            made.set_attribute("kvray.blocks", _num_held(runs))
            made.set_attribute("kvray.sources", len(_others(runs, self._peers.shard)))
            if obstacle == "store_down":
                fail(made, obstacle)
        return runs, obstacle

    async def _present(self, prefix: Prefix) -> dict[int, Mask]:
        """Return which blocks of each part are here; looked for in pieces, with pauses."""
        parts, pieces = list(prefix.block_bytes), []
        step = max(1, _PIECE // len(parts))
        for start in range(0, prefix.num_blocks, step):
            if start:
                await asyncio.sleep(0)
            pieces.append(self._arena.present(prefix.keys[start : start + step], parts))
        return dict(zip(parts, np.concatenate(pieces, axis=1), strict=True))

    def _has_any(self, prefix: Prefix, steps: Sequence[FetchStep]) -> bool:
        return any(
            self._arena.present(prefix.keys[step.start : step.stop], [step.part])[0].any()
            for step in steps
        )


def _is_large(prefix: Prefix) -> bool:
    """Return whether to look for its blocks all at once would hold up the loop."""
    return prefix.num_blocks * len(prefix.block_bytes) > _PIECE


async def _runs_on_disk(
    nvme: LocalDisk, keys: Sequence[BlockKey], parts: Sequence[int]
) -> list[Run]:
    """Return which of `keys` the disk has, looked for in pieces."""
    found: list[Run] = []
    step = max(1, _PIECE // max(1, len(parts)))
    for start in range(0, len(keys), step):
        some = keys[start : start + step]
        # Keys that the disk has not give no run, but those after them count from the first.
        for run in nvme.runs(some, parts) or [Run(stop=len(some), holders={})]:
            if found and found[-1].holders == run.holders:
                found.pop()
            found.append(Run(stop=start + run.stop, holders=run.holders))
        if start + step < len(keys):
            await asyncio.sleep(0)
    return found if any(run.holders for run in found) else []


def _num_held(runs: Sequence[Run]) -> int:
    starts = (0, *(run.stop for run in runs))
    return sum(run.stop - start for run, start in zip(runs, starts, strict=False) if run.holders)


def _others(runs: Sequence[Run], own: str) -> set[str]:
    # Runs are many, different sets of holders are few.
    different = {id(run.holders): run.holders for run in runs}
    return {shard for holders in different.values() for shard in holders} - {own, NVME}
