"""Hands a router's notes on requests to the shards, where `kvray explain` finds them."""

import asyncio
import logging
from collections.abc import Callable

from kvray.actors.ray_glue.calls import tier_named
from kvray.actors.staging.ask import Ask
from kvray.errors import KVRayError
from kvray.trace.routing_note import ROUTING_NOTES_MAX, RoutingNote, pack_routing

_log = logging.getLogger("ray.serve")
_EVERY_S = 0.5
_TIMEOUT_S = 2.0


class Reports:
    """Collects notes and sends them twice a second; for one event loop.

    People read them, nothing hangs on them: of too many the oldest go, and what a shard does not
    take in time is lost.
    """

    def __init__(self, ask: Ask, cluster_name: str, home: Callable[[str], str]) -> None:
        """Send each note to the `home` of its replica, a shard; empty: to nobody."""
        self._ask = ask
        self._cluster_name = cluster_name
        self._home = home
        self._due: dict[str, dict[str, RoutingNote]] = {}  # shard -> request -> its last note
        self._sending: asyncio.Task[None] | None = None

    def add(self, note: RoutingNote) -> None:
        """Send a note soon, in place of an earlier one of the same request."""
        shard = self._home(note.replica)
        if not shard:
            return
        due = self._due.setdefault(shard, {})
        due[note.request] = note
        if len(due) > ROUTING_NOTES_MAX:
            del due[next(iter(due))]
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._due:
            await asyncio.sleep(_EVERY_S)
            due, self._due = self._due, {}
            with tier_named(self._cluster_name):
                sent = (
                    self._ask(
                        shard, "routed", [*map(pack_routing, notes.values())], timeout_s=_TIMEOUT_S
                    )
                    for shard, notes in due.items()
                )
                for answer in await asyncio.gather(*sent, return_exceptions=True):
                    if isinstance(answer, KVRayError):
                        _log.debug("a shard did not take a router's notes: %s", answer)
