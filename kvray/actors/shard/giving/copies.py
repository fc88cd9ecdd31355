"""Copies: finds which blocks others have too, and gives the hottest ones to nodes that lack them.

An extra copy that nobody used for a while, or that is beyond the node's bound, goes before all
other blocks. A prefix that several nodes have and use often goes to the others before they are
asked for it; a node takes as much as its bound has room for. The holder that counts as the original
gives, so only one does.
"""

import asyncio
import logging
import time
from typing import Any

import numpy as np

from kvray.actors.shard.giving.choice import batches
from kvray.actors.shard.giving.giver import Giver
from kvray.config import CopiesConfig
from kvray.errors import KVRayError
from kvray.store import ArenaOwner
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array
from kvray.store.copies import are_extra
from kvray.store.retention import Retention

_log = logging.getLogger("kvray.shard")

_LOOK_S, _LOOKS_PER_S = 1.0, 20
"""Between two looks of a shard, and at most so many by all shards together."""
_PAUSES, _CHOOSE_S = 20, 10.0
"""A choice among many copies is followed by a pause, so many times as long, up to a bound."""
_BLOCKS, _ASKED = 4096, 1024
"""Blocks of a look, and of one question to the lookup."""
_SOON_S, _AGAIN_S = 5.0, 10.0
"""How often extra copies that go next are looked up, and all other blocks."""
_REST_S = 2 * _AGAIN_S
"""How long after the last event in the arena it goes on: others announce what they have later."""
_WINDOW_S, _HOT_USES, _HOT_BLOCKS = 5.0, 10, 1024
"""A block that is used so often within a window is hot; so many of them go to others."""
_GIVE_S = 2.0


class Copies:
    """The copies of one shard; state of its event loop, `status` from any thread."""

    def __init__(
        self, giver: Giver, owner: ArenaOwner, retention: Retention, settings: CopiesConfig
    ) -> None:
        self._giver = giver
        self._owner = owner
        self._retention = retention
        self._marks = retention.copies
        self._uses = retention.uses
        self._idle_s = settings.idle_s
        self._bytes_max = int(settings.share * owner.arena.tables.geometry.capacity)
        self._bytes_per_s = settings.bytes_per_s
        self._task: asyncio.Task[None] | None = None
        self._due_at = self._choose_at = 0.0
        self._looked_at = (-1, -1)
        """The arena's tick and count of changes when the last look began."""
        self._rests_at = 0.0
        self._window_at = 0.0
        self._counts: Array | None = None
        """The uses of all blocks when the window began."""
        self._given = {"given_blocks": 0, "given_bytes": 0}

    def tick(self, now: float, *, num_shards: int) -> None:
        """Look if it is time, and if the arena does not rest; waits for nothing."""
        if num_shards < 2 or now < self._due_at or not (self._task is None or self._task.done()):
            return
        self._due_at = now + max(_LOOK_S, num_shards / _LOOKS_PER_S)
        tables = self._owner.arena.tables
        at = tables.tick, tables.changes
        if at != self._looked_at:
            self._looked_at, self._rests_at = at, now + _REST_S
        if now < self._rests_at:
            self._task = asyncio.get_running_loop().create_task(self._look())
            self._task.add_done_callback(self._note_defect)

    async def close(self) -> None:
        """End it. Twice is fine."""
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    @property
    def room(self) -> int:
        """Bytes of copies that the node takes from others now."""
        return max(0, self._bytes_max - self._marks.num_bytes)

    def status(self) -> dict[str, Any]:
        """Return the bytes of extra copies, their bound, and what was given to others."""
        bytes_now = self._marks.num_bytes
        return {"extra_bytes": bytes_now, "bytes_max": self._bytes_max, **self._given}

    def _note_defect(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error(
                "%s: a look for copies ended by a defect", self._giver.shard, exc_info=defect
            )

    async def _look(self) -> None:
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            others = frozenset(await self._giver.targets())
            for slots in await in_thread(None, self._due):
                await self._look_up(slots, others)
            if (began := time.monotonic()) >= self._choose_at:
                await in_thread(None, self._choose)
                ended = time.monotonic()
                self._choose_at = ended + min(_CHOOSE_S, _PAUSES * (ended - began))
            await self._give_hot(await in_thread(None, self._hot), others)
        except KVRayError as error:
            _log.debug("%s: no look for copies: %s", self._giver.shard, error)

    def _due(self) -> list[Array]:
        slots = self._marks.due(
            self._owner.arena.tables,
            self._uses.used_at,
            now=time.monotonic(),
            soon_s=_SOON_S,
            again_s=_AGAIN_S,
            most=_BLOCKS,
        )
        return np.array_split(slots, -(-len(slots) // _ASKED)) if len(slots) else []

    async def _look_up(self, slots: Array, others: frozenset[str]) -> None:
        tables = self._owner.arena.tables
        # First: what is found of a block must not count for one that gets into its slot meanwhile.
        numbers, heads = tables.slot_number[slots], tables.slot_head[slots]
        holders = await self._giver.holders(tables, slots, others)
        extra = are_extra(heads, self._giver.shard, holders)
        self._marks.note(slots, numbers, extra, now=time.monotonic())

    def _choose(self) -> None:
        self._marks.choose(
            self._owner.arena.tables,
            self._uses.used_at,
            self._retention.rank_alone,
            now=time.monotonic(),
            idle_s=self._idle_s,
            bytes_max=self._bytes_max,
        )

    def _hot(self) -> Array:
        """Return the blocks used most in the window that ends now, parents first; [] before."""
        now, counts = time.monotonic(), self._uses.counts
        before, tables = self._counts, self._owner.arena.tables
        if before is not None and now - self._window_at < _WINDOW_S:
            return np.empty(0, dtype=np.int64)
        self._window_at, self._counts = now, counts.copy()
        if before is None:
            return np.empty(0, dtype=np.int64)
        uses = counts[tables.backed].astype(np.int64) - before[tables.backed]
        hot = np.flatnonzero((uses >= _HOT_USES) & (tables.slot_state[tables.backed] == READY))
        order = np.lexsort((tables.slot_depth[hot], -uses[hot]))
        return hot[order[:_HOT_BLOCKS]]

    async def _give_hot(self, hot: Array, others: frozenset[str]) -> None:
        """Give blocks that several nodes have to those of the `others` that lack them."""
        if not len(hot):
            return
        tables, own = self._owner.arena.tables, self._giver.shard
        holders = await self._giver.holders(tables, hot, others)
        is_shared = np.logical_or.reduce([np.zeros(len(hot), dtype=bool), *holders.values()])
        is_ours = is_shared & ~are_extra(tables.slot_head[hot], own, holders)
        left = int(self._bytes_per_s * _WINDOW_S)
        for target in sorted(others):
            lacks = is_ours & ~holders.get(target, np.zeros(len(hot), dtype=bool))
            if lacks.any() and left > 0:
                left -= await self._give(hot[lacks], target, left)

    async def _give(self, slots: Array, target: str, bytes_max: int) -> int:
        """Give a target the first of `slots`, as many as it and `bytes_max` have room for."""
        tables = self._owner.arena.tables
        try:
            room = min(bytes_max, await self._giver.peers.call(target, "room_for_copies"))
            first = next(batches(tables, slots, bytes_max=room, blocks_max=_HOT_BLOCKS))
            if tables.block_bytes(first).sum() > room:
                return 0
            gift = await self._giver.give(tables, first, target, seconds=_GIVE_S)
        except (KVRayError, AttributeError) as error:  # a shard of an older version takes none
            _log.debug("%s: %s gets no copies: %s", self._giver.shard, target, error)
            return 0
        num_bytes = int(tables.block_bytes(gift.slots).sum())
        self._given["given_blocks"] += len(gift.slots)
        self._given["given_bytes"] += num_bytes
        return num_bytes
