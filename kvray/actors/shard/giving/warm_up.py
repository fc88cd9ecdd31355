"""Warm-ups of a node: what others use most comes here before anybody asks for it.

Others offer their hottest blocks, and this node's mover fetches them, hottest first. They fill free
room only, and nothing goes for them. Engines of this node find them as if they had stored them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from kvray.actors.mover.orders import FetchOrder
from kvray.actors.ray_glue.arguments import packed
from kvray.actors.shard.giving.choice import is_wanted, pieces
from kvray.actors.shard.giving.giver import Giver
from kvray.actors.shard.giving.offer import merged, spans_of, within_quotas
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.staging.peers import mover_of, shard_of
from kvray.config import WarmUpConfig
from kvray.errors import CapacityError, KVRayError, ShardUnavailable
from kvray.store import ArenaOwner
from kvray.store.arena import key_index, slabs
from kvray.store.arena.layout import READY
from kvray.store.arena.room_ahead import DEMAND_SHARE
from kvray.store.arena.tables import Array

_log = logging.getLogger("kvray.shard")

_BATCH_BYTES, _BATCH_BLOCKS = 64 * 2**20, 1024
_BATCH_S = 5.0  # how long a batch may take
_SOURCES_MAX = 16
_ORDERS_MAX = 8
_OFFER_S = 10.0  # how long others may rank their blocks
_START_S, _POLL_S = 60.0, 0.25
"""How long a new node's mover may take to serve, and how often it is asked."""
_ITSELF = "new here"
"""Who orders a warm-up that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpOrder:
    """What a node is to be given."""

    by: str
    """Who wants it, for people."""
    wanted: Mapping[int, frozenset[int]]
    """The parts by the numbers of their namespaces; none: all that others have."""
    deadline_s: float


class WarmUp:
    """The warm-ups of one shard, one after the other; state of its event loop."""

    def __init__(
        self,
        giver: Giver,
        owner: ArenaOwner,
        nvme: Callable[[], NvmeTier | None],
        settings: WarmUpConfig,
        *,
        free_target: float,
    ) -> None:
        """Warm up the arena of `owner`, but for the share that eviction may keep free."""
        self._giver, self._peers, self._shard = giver, giver.peers, giver.shard
        self._owner = owner
        self._nvme = nvme
        self._settings = settings
        capacity = owner.arena.tables.geometry.capacity
        self._bytes_max = int(settings.share * capacity)
        self._reserve = int(max(free_target, 1 / DEMAND_SHARE) * capacity)
        self._orders: list[WarmUpOrder] = []
        """The first is carried out."""
        self._task: asyncio.Task[None] | None = None
        self._read: Mapping[int, frozenset[int]] | None = None
        """What this node's engines read at the last look; None: it has not looked yet."""
        self._figures: dict[str, Any] = {}
        self._total_bytes = 0

    def look(self, read: Mapping[int, frozenset[int]]) -> None:
        """Have an empty arena warmed up, and one that has nothing of what is newly read here.

        `read` has the parts that this node's engines read, by the numbers of their namespaces.
        """
        before, self._read = self._read, read
        if not self._bytes_max or before == read:
            return
        tables = self._owner.arena.tables
        slots = tables.slots_in(READY)
        new = {}
        for number, parts in read.items():
            more = parts - (before or {}).get(number, frozenset())
            if more and not is_wanted(tables, slots, {number: more}).any():
                new[number] = more
        is_new = bool(new) or (before is None and not len(slots))
        if is_new and len(self._orders) < _ORDERS_MAX:
            deadline_s = self._settings.deadline_s
            self.order(WarmUpOrder(by=_ITSELF, wanted=new, deadline_s=deadline_s))

    def order(self, order: WarmUpOrder) -> None:
        """Have the node warmed up; CapacityError: it has too much of that to do."""
        if order in self._orders[1:]:
            return
        if len(self._orders) >= _ORDERS_MAX:
            raise CapacityError(f"{self._shard} has {_ORDERS_MAX} warm-ups to do; try again later.")
        self._orders.append(order)
        if self._task is None or self._task.done():
            self._figures = _nothing_yet(order)
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._note_defect)

    def status(self) -> dict[str, Any] | None:
        """Return how far the latest is, from any thread; None: there was none."""
        figures = dict(self._figures)
        if not figures:
            return None
        if self._orders:
            figures["state"] = "moving"
        return {**figures, "total_bytes": self._total_bytes}

    async def close(self) -> None:
        """End it. Twice is fine."""
        self._orders.clear()
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)

    def _note_defect(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._orders.clear()
            _log.error("%s: a warm-up ended by a defect", self._shard, exc_info=defect)
            self._end("It ended by a defect, see the shard's log.")

    async def _run(self) -> None:
        while self._orders:
            order, began, failure = self._orders[0], time.monotonic(), ""
            self._figures = _nothing_yet(order)
            try:
                await self._fill(order)
            except KVRayError as error:
                failure = str(error)
            self._figures["seconds"] = round(time.monotonic() - began, 3)
            self._orders.remove(order)
            self._end(failure)
            if self._figures["blocks"] or order.by != _ITSELF:
                _log.info("%s: a warm-up has ended: %s", self._shard, self._figures)

    def _end(self, failure: str) -> None:
        message = failure or self._figures["message"]
        state = "failed" if failure else "done"
        self._figures |= {"state": state, "left_bytes": 0, "message": message}

    async def _fill(self, order: WarmUpOrder) -> None:
        """Bring what others have and this node lacks, as far as there is room and time."""
        rows, shards = await self._offered(order)
        if not len(rows):
            return
        await self._await_mover()
        until = time.monotonic() + order.deadline_s
        sizes = rows["num_bytes"]
        self._figures["left_bytes"] = int(sizes.sum())
        for piece in pieces(sizes, bytes_max=_BATCH_BYTES, blocks_max=_BATCH_BLOCKS):
            left_s, size = until - time.monotonic(), int(sizes[piece].sum())
            if self._is_overtaken(order) or left_s <= 0 or self._room() < size:
                break
            await self._take(rows[piece], shards[piece], min(left_s, _BATCH_S))
            self._figures["left_bytes"] -= size

    def _is_overtaken(self, order: WarmUpOrder) -> bool:
        """Return whether others wait for what is wanted more than the node's own order."""
        waiting = self._orders[1:] if order.by == _ITSELF else []
        return any(one.by != _ITSELF or not order.wanted for one in waiting)

    async def _offered(self, order: WarmUpOrder) -> tuple[Array, Array]:
        """Return the blocks to bring, hottest first, and the shard that each is to come from."""
        others = await self._giver.targets()
        others = Random(self._shard).sample(others, min(len(others), _SOURCES_MAX))
        num_bytes = min(self._bytes_max, self._room())
        if not others or num_bytes <= 0:
            self._figures["message"] = "It has no room." if others else "No other node is there."
            return np.empty(0), np.empty(0)
        asked = order.wanted, num_bytes
        answers = await asyncio.gather(
            *(self._peers.call_watched(one, "offer", *asked, work_s=_OFFER_S) for one in others),
            return_exceptions=True,
        )
        offers: dict[str, Array] = {}
        for shard, answer in zip(others, answers, strict=True):
            if isinstance(answer, np.ndarray):
                offers[shard] = answer
            elif isinstance(answer, KVRayError):
                self._figures["message"] = str(answer)
            elif not isinstance(answer, AttributeError):  # that is a shard of an older version
                raise answer
        return await asyncio.get_running_loop().run_in_executor(
            None, self._chosen, offers, num_bytes
        )

    def _chosen(self, offers: dict[str, Array], num_bytes: int) -> tuple[Array, Array]:
        """Return what the node lacks of the `offers`, at most so many bytes; in a thread."""
        if not offers:
            return np.empty(0), np.empty(0)
        rows, sources = merged(list(offers.values()))
        nvme, lacks = self._nvme(), np.ones(len(rows), dtype=bool)
        for tables in (self._owner.arena.tables, *(() if nvme is None else (nvme.store.tables,))):
            slots = key_index.find(tables, rows["key"], rows["part"])
            lacks &= (slots < 0) | (tables.slot_state[slots] != READY)
        rows, sources = rows[lacks], sources[lacks]
        fits = within_quotas(rows, self._owner.arena.tables)
        rows, sources = rows[fits], sources[fits]
        count = int(np.searchsorted(np.cumsum(rows["num_bytes"]), num_bytes, side="right"))
        return rows[:count], np.array(list(offers))[sources[:count]]

    async def _await_mover(self) -> None:
        """Return when this node's mover serves; that of a new node may still start."""
        until = time.monotonic() + _START_S
        while True:
            try:
                found = await self._peers.call(mover_of(self._shard), "status")
                if found["state"] == "serving":
                    return
                error = ShardUnavailable(str(found.get("message", found["state"])))
            except ShardUnavailable as silence:
                error = silence
            if time.monotonic() > until:
                raise error
            await asyncio.sleep(_POLL_S)

    async def _take(self, rows: Array, shards: Array, seconds: float) -> None:
        """Fetch some blocks, those that their nodes have on disk too."""
        # A node that has just failed would cost each batch the time of a call.
        askable = list(self._peers.may_ask(set(shards.tolist()), without=frozenset()))
        rows, shards = rows[np.isin(shards, askable)], shards[np.isin(shards, askable)]
        spans = spans_of(rows, shards.tolist())
        order = FetchOrder(
            spans=tuple(span for _, span in spans), deadline_s=seconds, purpose="gift"
        )
        for shard in np.unique(shards[rows["on_disk"]]).tolist():
            its = tuple(span for span in order.spans if span.source == mover_of(shard))
            promotion = FetchOrder(spans=its, deadline_s=seconds)
            try:
                await self._peers.call(shard, "promote", *packed(promotion), work_s=seconds)
            except KVRayError as error:  # what is in its memory comes all the same
                self._figures["message"] = str(error)
        report = await self._peers.fetch(order)
        for (chain, span), here in zip(spans, report.here, strict=True):
            self._note(shard_of(span.source), rows["num_bytes"][chain[:here]])
        for source, one in report.sources.items():
            if one.error:
                self._figures["message"] = f"{shard_of(source)}: {one.message}"

    def _note(self, shard: str, sizes: Array) -> None:
        figures, num_bytes = self._figures, int(sizes.sum())
        figures["blocks"] += len(sizes)
        figures["bytes"] += num_bytes
        self._total_bytes += num_bytes
        if num_bytes and shard not in figures["sources"]:
            figures["sources"] = sorted([*figures["sources"], shard])

    def _room(self) -> int:
        return slabs.free_bytes(self._owner.arena.tables) - self._reserve


def _nothing_yet(order: WarmUpOrder) -> dict[str, Any]:
    figures = {"blocks": 0, "bytes": 0, "left_bytes": 0, "seconds": 0.0, "sources": []}
    return {"state": "moving", "by": order.by, **figures, "message": ""}
