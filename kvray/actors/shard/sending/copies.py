"""Copies: finds which blocks others have too.

An extra copy that nobody used for a while, or that is beyond the node's bound, goes before all
other blocks.
"""

import asyncio
import logging
import time
from typing import Any

import numpy as np

from kvray.actors.shard.sending.sender import Sender
from kvray.config import CopiesConfig
from kvray.errors import KVRayError
from kvray.store.arena.tables import Array
from kvray.store.copies import are_extra

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


class Copies:
    """The copies of one shard; state of its event loop, `status` from any thread."""

    def __init__(self, sender: Sender, settings: CopiesConfig) -> None:
        self._sender = sender
        self._owner = sender.owner
        self._marks = sender.retention.copies
        self._uses = sender.retention.uses
        self._idle_s = settings.idle_s
        self._bytes_max = int(settings.share * sender.owner.arena.tables.geometry.capacity)
        self._task: asyncio.Task[None] | None = None
        self._due_at = self._choose_at = 0.0
        self._looked_at = (-1, -1)
        """The arena's tick and count of changes when the last look began."""
        self._rests_at = 0.0

    def tick(self, now: float, *, num_shards: int) -> None:
        """Look if it is time, and if the arena does not rest; waits for nothing."""
        if num_shards < 2 or now < self._due_at or not (self._task is None or self._task.done()):
            return
        self._due_at = now + max(_LOOK_S, num_shards / _LOOKS_PER_S)
        tables = self._owner.arena.tables
        at = tables.counts.tick, tables.counts.changes
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
        self._task = None  # what it was cut off in would keep the arena mapped

    def status(self) -> dict[str, Any]:
        """Return the bytes of extra copies, and their bound."""
        return {"extra_bytes": self._marks.num_bytes, "bytes_max": self._bytes_max}

    def _note_defect(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error(
                "%s: a look for copies ended by a defect", self._sender.shard, exc_info=defect
            )

    async def _look(self) -> None:
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            others = frozenset(await self._sender.targets())
            for slots in await in_thread(None, self._due):
                await self._look_up(slots, others)
            if (began := time.monotonic()) >= self._choose_at:
                await in_thread(None, self._choose)
                ended = time.monotonic()
                self._choose_at = ended + min(_CHOOSE_S, _PAUSES * (ended - began))
        except KVRayError as error:
            _log.debug("%s: no look for copies: %s", self._sender.shard, error)

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
        holders = await self._sender.holders(tables, slots, others)
        extra = are_extra(heads, self._sender.shard, holders)
        self._marks.note(slots, numbers, extra, now=time.monotonic())

    def _choose(self) -> None:
        self._marks.choose(
            self._owner.arena.tables,
            self._uses.used_at,
            self._sender.retention.rank_alone,
            now=time.monotonic(),
            idle_s=self._idle_s,
            bytes_max=self._bytes_max,
        )
