"""The drain of a node: while it is ordered, blocks that no other node has go to others.

What eviction would keep longest goes first, so a deadline cuts off what is worth least. Another
node's mover fetches, as it does for a prompt; nothing is half there. Engines of this node go on:
what they save meanwhile goes too, and what they use is used where it went, so that it stays there.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from kvray.actors.shard.loop_thread import pause
from kvray.actors.shard.sending.sender import Sender, batches, names_of, shared_out
from kvray.errors import KVRayError
from kvray.store.arena.tables import Array, Tables

_log = logging.getLogger("kvray.shard")

_BATCH = {"bytes_max": 64 * 2**20, "blocks_max": 1024}
_BATCH_S = 20.0  # how long a batch may take
_AGAIN_S, _PAUSES = 1.0, 20
"""Between two looks for what has come meanwhile; so many times as long as a look takes."""

_FIGURES = "moved_blocks", "moved_bytes", "left_bytes", "behind_bytes"
"""What has gone, what is still to go, and what others have no room for, as far as is known."""

_LOOK_S = 1.0
"""A use counts from the look at the arena that found it, which began so long before at most. Told
twice, it is one use."""


class Drain:
    """The drain of one shard; state of its event loop, `status` from any thread."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._shard = sender.shard
        self._orders: dict[str, float | None] = {}
        """Who ordered it -> until when blocks may go; None: as long as it takes."""
        self._task: asyncio.Task[None] | None = None
        self._settled: list[Array] = []
        """Names of the blocks that others have; one that comes back later is not sent again."""
        self._told_at = 0.0
        """Until when the others know what was used here, in monotonic seconds."""
        self._budget: int | None = None
        """Bytes that others are still to take; None: they were not asked yet."""
        self._ranking_s = 0.0
        self._woken = asyncio.Event()
        """Set by an order: what there is to do, or until when, has changed."""
        self._figures: dict[str, Any] = {}

    @property
    def is_on(self) -> bool:
        """Whether the node is being drained."""
        return bool(self._orders)

    def order(self, by: str, seconds: float | None) -> None:
        """Have the node drained, within so many `seconds`; `by` names who wants it."""
        is_new = not self._orders
        self._orders[by] = None if seconds is None else time.monotonic() + seconds
        # A run that has not noticed a call-off goes on: it has what it began with.
        if self._task is None or self._task.done():
            self._settled.clear()
            self._told_at, self._budget = 0.0, None
            self._figures = dict.fromkeys(_FIGURES, 0)
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._note_defect)
        if is_new:
            within = "" if seconds is None else f" within {seconds:.0f} s"
            _log.warning("%s: draining the node%s (requested by %s)", self._shard, within, by)
            self._figures["state"] = "moving"
            self._woken.set()

    def call_off(self, by: str) -> None:
        """Take an order back; what was moved stays where it is."""
        if self._orders.pop(by, "none") != "none" and not self._orders:
            _log.warning("%s: the node stays after all, as %s says", self._shard, by)

    async def close(self) -> None:
        """End it. Twice is fine."""
        self._orders.clear()
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        self._task = None  # what it was cut off in would keep the arena mapped

    def status(self) -> dict[str, Any] | None:
        """Return how far it is; None: the node is to stay."""
        orders = dict(self._orders)
        if not orders:
            return None
        until = _soonest(orders)
        left_s = None if until is None else round(max(0.0, until - time.monotonic()), 1)
        return {"by": sorted(orders), "seconds_left": left_s, **self._figures}

    def _note_defect(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("%s: the drain ended by a defect", self._shard, exc_info=defect)
            self._figures["message"] = "It ended by a defect, see the shard's log; order it again."

    async def _run(self) -> None:
        while self._orders:
            self._woken.clear()
            goes_on = False
            try:
                goes_on = await self._move()
            except KVRayError as error:
                self._figures["message"] = str(error)
            if not goes_on:
                await pause(self._woken, max(_AGAIN_S, _PAUSES * self._ranking_s))

    async def _move(self) -> bool:
        """Have the hottest of what is only here sent once, as far as there is time and room.

        Returns whether to go on at once: some of it was elsewhere, so there is room for more.
        """
        is_late = self._left_s() <= 0
        targets = [] if is_late else await self._sender.targets()
        if not targets and self._figures["state"] != "moving":
            return False
        in_thread = asyncio.get_running_loop().run_in_executor
        ranked, tiers = await in_thread(None, self._look)
        alone = sum(int(one.block_bytes(slots).sum()) for one, slots in tiers)
        if not targets:
            self._figures["left_bytes"] = alone
            if is_late:
                self._figures["state"] = "late"
            else:
                advice = "No other node can take blocks; add a node, or cancel the drain."
                self._figures["message"] = advice
            return False
        self._figures.pop("message", None)
        if self._budget is None:
            tables, slots = tiers[0]
            self._budget = await self._room(targets, int(tables.block_bytes(slots).sum()))
        left = sum(int(one.block_bytes(self._fitting(one, slots)).sum()) for one, slots in tiers)
        self._figures["left_bytes"] = max(0, min(left, self._budget))
        self._figures["behind_bytes"] = alone - self._figures["left_bytes"]
        self._figures["state"] = "moving" if self._figures["left_bytes"] > 0 else "moved"
        goes_on = False
        for tables, slots in tiers:
            # Cut before it is shared out: else a fast target is sent what a slow one has no room
            # for then, though that is hotter.
            hottest, num_settled = self._fitting(tables, slots), self._num_settled
            shares = zip(targets, shared_out(tables, hottest, len(targets)), strict=True)
            await self._at_once(self._send(tables, its, to, targets) for to, its in shares)
            goes_on |= len(hottest) < len(slots) and self._num_settled > num_settled
        since, self._told_at = self._told_at, time.monotonic() - _LOOK_S
        tables, slots = ranked[0]
        used = await in_thread(None, self._used, tables, slots, since)
        shares = zip(targets, shared_out(tables, used, len(targets)), strict=True)
        await self._at_once(self._tell_uses(tables, its, to) for to, its in shares)
        return goes_on

    async def _at_once(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Do the work for all targets; what one of them refuses is noted."""
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, KVRayError):
                self._figures["message"] = str(error)
            elif isinstance(error, BaseException):
                raise error

    def _fitting(self, tables: Tables, slots: Array) -> Array:
        """Return the first of `slots`, as many as others are still to take."""
        return slots[np.cumsum(tables.block_bytes(slots)) <= self._budget]

    async def _room(self, targets: list[str], num_bytes: int) -> int:
        """Return how many bytes the targets are to take; so many are in the memory here.

        That is what they have free, and in place of blocks of theirs so much that all nodes keep
        the same share of what they have: the blocks of one are worth no more than another's. Blocks
        on the disk are worth less than those in another's memory.
        """
        rooms = await asyncio.gather(
            *(self._sender.peers.call(one, "room") for one in targets), return_exceptions=True
        )
        free = sum(room for room in rooms if isinstance(room, int))
        return free + num_bytes * len(targets) // (len(targets) + 1)

    def _left_s(self) -> float:
        until = _soonest(self._orders)
        return _BATCH_S if until is None else min(_BATCH_S, until - time.monotonic())

    def _look(self) -> tuple[list[tuple[Tables, Array]], list[tuple[Tables, Array]]]:
        """Return the blocks of memory and disk, hottest first, and those that others lack yet."""
        began = time.monotonic()
        ranked = self._sender.hottest()
        unsent = [(tables, slots[~self._is_settled(tables, slots)]) for tables, slots in ranked]
        self._ranking_s = time.monotonic() - began
        return ranked, unsent

    def _used(self, tables: Tables, slots: Array, since: float) -> Array:
        """Return those of `slots` of the memory that others have, and that were used `since`."""
        counts, used_at = self._sender.retention.uses.of(slots)
        used = slots[(counts > 0) & (used_at >= since)]
        return used[self._is_settled(tables, used)]

    @property
    def _num_settled(self) -> int:
        return sum(len(one) for one in self._settled)

    def _is_settled(self, tables: Tables, slots: Array) -> Array:
        settled = np.concatenate([np.empty(0, dtype=np.uint64), *self._settled])
        return np.isin(names_of(tables, slots), settled)

    async def _tell_uses(self, tables: Tables, slots: Array, target: str) -> None:
        """Have a target count a use of those of `slots` that it has, the hottest last."""
        for batch in reversed([*batches(tables, slots, **_BATCH)]):
            held = await self._sender.held(tables, batch, frozenset({target}))
            if not self._orders or (left_s := self._left_s()) <= 0:
                return
            await self._sender.send(tables, batch[held], target, seconds=left_s, is_use=True)

    async def _send(
        self, tables: Tables, slots: Array, target: str, targets: Sequence[str]
    ) -> None:
        """Have a target fetch those of `slots` that none of the `targets` has."""
        assert self._budget is not None
        for batch in batches(tables, slots, **_BATCH):
            names = names_of(tables, batch)  # first: a slot may get another block meanwhile
            held = await self._sender.held(tables, batch, frozenset(targets))
            left_s = self._left_s()
            if not self._orders or left_s <= 0:
                return
            sent, fault = await self._sender.send(tables, batch[~held], target, seconds=left_s)
            num_here = int(tables.block_bytes(sent).sum())
            self._budget -= num_here
            if fault:
                self._figures["message"] = fault
            self._settled.append(names[held | np.isin(batch, sent)])
            self._figures["moved_blocks"] += len(sent)
            self._figures["moved_bytes"] += num_here
            left = self._figures["left_bytes"] - int(tables.block_bytes(batch).sum())
            self._figures["left_bytes"] = max(0, min(left, self._budget))


def _soonest(orders: dict[str, float | None]) -> float | None:
    return min((until for until in orders.values() if until is not None), default=None)
