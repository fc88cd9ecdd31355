"""Stages prefixes: has blocks of other nodes and of this node's disk in its arena before a promise.

All state belongs to the shard's event loop. No `await` stands between reading what a decision rests
on and acting on it, so no two fetches bring the same block. A stage waits only for movers and the
disk, which wait for nobody, and never for another shard's stage: two shards that stage from each
other cannot stop each other. Every wait ends with a deadline.

A long prefix of many parts is looked at in pieces, between which others have their turn. Nothing
that it found is taken for true after that: blocks are looked for again before they are fetched.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvray.actors.lookup.partitions import partition_of
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.fetcher import Fetch, Fetcher, LocalDisk, arrivals_by, first_steps
from kvray.actors.staging.peers import Peers
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
_CANCEL_S = 0.1
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


class Handovers:
    """The shard's own leases on staged blocks, until the asking engine has its own.

    Each ends at its time; of too many the oldest ends earlier. Its blocks are then as likely to
    stay as any that were just used.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: deque[tuple[float, tuple[Lease, ...]]] = deque()

    def __len__(self) -> int:
        """Return how many prefixes are held."""
        return len(self._held)

    def keep(self, held: Held, *, until: float) -> None:
        """Take over the leases of a prefix and hold them until then."""
        if held.leases:
            self._held.append((until, held.leases))
        while len(self._held) > _HANDOVERS_MAX and self._release_oldest():
            pass

    def expire(self, now: float) -> None:
        """Release the leases whose time is over; if the arena is busy, the next time."""
        while self._held and self._held[0][0] <= now and self._release_oldest():
            pass

    def close(self) -> None:
        """Release all leases; if the arena is too busy, they end with this process."""
        while self._held and self._release_oldest():
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
        self.handovers = Handovers(arena)
        self._arena = arena
        self._peers = peers
        self._settings = settings
        self._num_shards = num_shards
        self._num_partitions = num_partitions
        self._nvme = nvme
        self._fetcher = Fetcher(
            peers,
            nvme,
            deadline_s=settings.deadline_s,
            fetches_max=settings.fetches_max,
            waiting_max=_WAITING_MAX,
        )
        self._stages: set[asyncio.Task[StageReason]] = set()
        self._is_closing = False
        self._counts: Counter[str] = Counter()

    async def stage(self, prefix: Prefix, *, wait_s: float) -> Staged:
        """Fetch the missing blocks of `prefix`; return what is here after `wait_s` at most.

        Late fetches go on for `deadline_s`; their blocks are here for the next request.

        Raises:
            CapacityError, ShardUnavailable: the shard could not become a holder of its arena.
        """
        until = time.monotonic() + min(wait_s, self._settings.deadline_s)
        self._counts["stages"] += 1
        if len(self._stages) >= _STAGES_MAX:
            self._counts["refused"] += 1
            return Staged(num_blocks=0, reason="too_slow")
        fetches: list[Fetch] = []
        task = asyncio.get_running_loop().create_task(self._stage(prefix, fetches))
        self._stages.add(task)
        task.add_done_callback(self._end_stage)
        # Not `wait_for`, which would cancel a stage that is late.
        done, _ = await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        if task.cancelled():
            raise ShardUnavailable(f"{self._peers.shard} ends.")
        reason: StageReason = "too_slow"
        if done:
            reason = "store_down" if task.exception() else task.result()
        else:
            self._counts["late"] += 1
        num_blocks = await self.lease(prefix, until=until)
        return Staged(
            num_blocks=num_blocks,
            reason="none" if num_blocks == len(prefix.keys) else reason,
            arrivals=arrivals_by(fetches, prefix.keys[:num_blocks], self._peers.last_transport),
        )

    async def num_here(self, prefix: Prefix) -> int:
        """Return how many leading blocks are here."""
        return longest_prefix(prefix, await self._present(prefix))

    def on_disk(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> bytes:
        """Return one byte for each key: 1 if this node has all `parts` of it on its disk only."""
        nvme = self._nvme()
        away, wanted, start = np.zeros(len(keys), dtype=bool), sum(1 << part for part in parts), 0
        for run in [] if nvme is None else nvme.runs(keys, parts):
            away[start : run.stop] = run.holders.get(NVME, 0) & wanted == wanted
            start = run.stop
        away &= ~np.logical_and.reduce(self._arena.present(keys, parts))
        return bytes(away)

    def ways(self) -> tuple[Peer | None, dict[str, Peer]]:
        """Return this node's disk, if it has one, and the shards that gave it blocks: how fast."""
        nvme = self._nvme()
        return None if nvme is None else nvme.peer(), self._peers.measured()

    async def lease(self, prefix: Prefix, *, until: float) -> int:
        """Keep the blocks of `prefix` for `handover_s`.

        Returns how many leading blocks; 0 if the arena is busy until then.
        """
        self._arena.join("shard")
        if not _is_large(prefix):
            held = await self._lease(prefix.keys, prefix.readers, until)
            return held.num_blocks if held is not None else 0
        # Part by part, each as far as the one before it: a window ends with the prefix.
        num_blocks, in_a_row = longest_prefix(prefix, await self._present(prefix)), 0
        for one in itertools.cycle(prefix.parts):
            if not num_blocks or in_a_row == len(prefix.parts):
                break
            held = await self._lease(prefix.keys[:num_blocks], [[one]], until)
            found = held.num_blocks if held is not None else 0
            in_a_row = in_a_row + 1 if found == num_blocks else 1
            num_blocks = found
            await asyncio.sleep(0)
        return num_blocks

    async def _lease(
        self, keys: Sequence[BlockKey], readers: Sequence[Sequence[PartRequest]], until: float
    ) -> Held | None:
        while True:
            held = self._arena.lease_for(keys, readers)
            now = time.monotonic()
            if held is not None:
                self.handovers.keep(held, until=now + self._settings.handover_s)
                return held
            if now + _BUSY_S > until:
                return None
            await asyncio.sleep(_BUSY_S)

    async def close(self) -> None:
        """End all stages and fetches, and let go of what is held. Twice is fine."""
        self._is_closing = True
        while tasks := [*self._stages, *self._fetcher.tasks]:
            # Before Python 3.12 a cancellation is lost if the awaited thing has just finished, so
            # tasks are cancelled until they end.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_S)
        self.handovers.close()

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        return {
            **{name: self._counts[name] for name in _COUNTED},
            **self._fetcher.status(),
            "handovers": len(self.handovers),
            "peers": self._peers.status(),
        }

    async def _stage(self, prefix: Prefix, fetches: list[Fetch]) -> StageReason:
        """Add the fetches for missing blocks to `fetches`; return why not all blocks are here."""
        try:
            stage = self._fetch_in_turns(prefix, fetches)
            return await asyncio.wait_for(stage, self._settings.deadline_s)
        except asyncio.TimeoutError:
            return "too_slow"
        except ShardUnavailable:
            return "store_down"

    async def _fetch_in_turns(self, prefix: Prefix, fetches: list[Fetch]) -> StageReason:
        windowed = frozenset(part for part, window, _ in prefix.parts if window is not None)
        runs: list[Run] | None = None
        obstacle: StageReason = "not_stored"
        others: set[str] = set()
        has_own = False
        failed: frozenset[str] = frozenset()
        fruitless = joins = 0
        # The deadline is checked here too: a cancellation may be lost, see `close`.
        until = time.monotonic() + self._settings.deadline_s
        while fruitless < _FRUITLESS_MAX and time.monotonic() < until and not self._is_closing:
            here = await self._present(prefix)
            if longest_prefix(prefix, here) == prefix.num_blocks:
                return "none"
            if runs is None:
                runs, obstacle = await self._locate(prefix)
                others = _others(runs, self._peers.shard)
                has_own = any(NVME in run.holders for run in runs)
                continue
            peers = self._fetcher.may_ask(others, failed)
            is_late = len(peers) < len(others) + has_own
            plan = plan_staging(prefix, here, runs, peers)
            if not plan.steps:
                if plan.reason != "not_stored":
                    return plan.reason
                # Sources that cannot be asked now may have more.
                return "too_slow" if is_late else obstacle
            # No `await` from here to the start of the fetch: what is read stays true.
            steps = first_steps(plan.steps)
            if _is_large(prefix) and self._has_any(prefix, steps):
                continue  # they came while the others were looked for
            before = self._fetcher.covering(prefix.keys, steps)
            if before:
                self._counts["joined"] += not joins
                fetches += [one for one in before if one not in fetches]
                with self._fetcher.waiting_for(before), span("fetch", {"kvray.joined": True}):
                    await _any_finished(before, _JOINED_S[min(joins, len(_JOINED_S) - 1)])
                joins += 1
                continue
            fetch = self._fetcher.start(prefix.keys, steps, windowed)
            fetches.append(fetch)
            with self._fetcher.waiting_for([fetch]):
                await fetch.finished.wait()
            if fetch.report is None:
                return "store_down"  # the node's own mover, which every other source needs too
            if not fetch.is_whole:
                # Do not ask the sources that lacked blocks again; others may have changed too.
                fruitless += 1
                failed |= fetch.lacking()
                runs = None
        return "too_slow"

    async def _locate(self, prefix: Prefix) -> tuple[list[Run], StageReason]:
        """Return the holders of `prefix`, and why there may be more of it than they have."""
        with span("lookup", {"kvray.shard": self._peers.shard}) as made:
            runs, obstacle = await self._find(prefix)
            made.set_attribute("kvray.blocks.asked", len(prefix.keys))
            made.set_attribute("kvray.blocks", _num_held(runs))
            made.set_attribute("kvray.sources", len(_others(runs, self._peers.shard)))
            if obstacle == "store_down":
                fail(made, obstacle)
        return runs, obstacle

    async def _find(self, prefix: Prefix) -> tuple[list[Run], StageReason]:
        parts = list(prefix.block_bytes)
        nvme = self._nvme()
        own = [] if nvme is None else await _runs_on_disk(nvme, prefix.keys, parts)
        if self._num_shards() <= 1:
            return own, "not_stored" if self._num_shards() else "store_down"
        if not self._peers.can_fetch:
            return own, "store_down"
        try:
            lookup = lookup_name(partition_of(prefix.keys[0], self._num_partitions))
            keys = in_pieces(b"".join(prefix.keys))
            found: list[Run] = await self._peers.call(lookup, "locate", *keys)
        except ShardUnavailable:
            return own, "store_down"
        return merged(own, found), "not_stored"

    async def _present(self, prefix: Prefix) -> dict[int, Mask]:
        """Return which blocks of each part are here; looked for in pieces if it is large."""
        parts = list(prefix.block_bytes)
        if not _is_large(prefix):
            return dict(zip(parts, self._arena.present(prefix.keys, parts), strict=True))
        found: dict[int, Mask] = {}
        for part in parts:
            pieces = []
            for start in range(0, prefix.num_blocks, _PIECE):
                keys = prefix.keys[start : start + _PIECE]
                pieces.append(self._arena.present(keys, [part])[0])
                await asyncio.sleep(0)
            found[part] = np.concatenate(pieces)
        return found

    def _has_any(self, prefix: Prefix, steps: Sequence[FetchStep]) -> bool:
        return any(
            self._arena.present(prefix.keys[step.start : step.stop], [step.part])[0].any()
            for step in steps
        )

    def _end_stage(self, task: "asyncio.Task[StageReason]") -> None:
        self._stages.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("a stage ended by a defect", exc_info=defect)


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


async def _any_finished(fetches: Sequence[Fetch], timeout_s: float) -> None:
    """Wait until one of `fetches` has finished, but no longer than `timeout_s`."""
    waits = [asyncio.ensure_future(fetch.finished.wait()) for fetch in fetches]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
