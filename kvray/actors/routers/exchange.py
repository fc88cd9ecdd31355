"""Routers of several ingresses tell each other what they sent, so that each knows every queue.

A small actor keeps what they told lately. Whoever needs it first makes it, and it ends with that
process; the next router makes another. Without it each router knows its own requests alone.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from kvray.actors.names import namespace_of
from kvray.routing import ReplicaLoads, Told

_log = logging.getLogger("ray.serve")

_KEPT_MAX = 8192
_ROUTER_S = 10.0
"""A router that was not heard for so long is gone."""
_SHARED_S = 0.05
_ALONE_S = 1.0
"""How often a router asks; less often while it is the only one."""
_TIMEOUT_S = 2.0
_RETRY_S = 5.0


class Exchange:
    """What all routers of a deployment told; the inside of the actor."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, str, Told]] = deque(maxlen=_KEPT_MAX)
        self._numbers = itertools.count()
        self._next = 0
        self._routers: dict[str, float] = {}

    def exchange(
        self, router: str, cursor: int | None, told: Sequence[Told]
    ) -> tuple[int, list[Told], int]:
        """Take what a router tells; return what the others told since its last call.

        The answer has the cursor for the next call (None at the first one), what was told, and how
        many routers there are.
        """
        now = time.monotonic()
        self._routers[router] = now
        alive = {name: at for name, at in self._routers.items() if now - at < _ROUTER_S}
        self._routers = alive
        # From the newest back: most of what is kept was heard before.
        new: list[Told] = []
        for number, origin, one in reversed(self._told):
            if cursor is None or number < cursor:
                break
            if origin != router:
                new.append(one)
        for one in told:
            self._next = next(self._numbers) + 1
            self._told.append((self._next - 1, router, one))
        return self._next, new[::-1], len(alive)


class Sharing:
    """One router's end; used by its event loop."""

    def __init__(self, name: str, cluster_name: str) -> None:
        """Share with the routers that give the same `name`, that of the deployment."""
        self._options: Any = {
            "name": f"kvray-routes-{name}",
            "namespace": f"{namespace_of(cluster_name)}-routes",  # no part of the tier
            "get_if_exists": True,
            "num_cpus": 0,
        }
        self._router = secrets.token_hex(8)
        self._outbox: deque[Told] = deque(maxlen=_KEPT_MAX)
        self._running: asyncio.Task[None] | None = None

    def tell(self, told: Told) -> None:
        """Have the others hear something."""
        self._outbox.append(told)

    def start(self, loads: ReplicaLoads) -> None:
        """Begin to exchange, once; ends with the loop."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run(loads))

    async def _run(self, loads: ReplicaLoads) -> None:
        actor: Any = None
        cursor: int | None = None
        has_failed = False
        while True:
            told, pause_s = [*self._outbox], _RETRY_S
            self._outbox.clear()
            try:
                if actor is None:
                    made = ray.remote(Exchange).options(**self._options)
                    actor, cursor = await asyncio.to_thread(made.remote), None
                asked = actor.exchange.remote(self._router, cursor, told)
                cursor, heard, num_routers = await asyncio.wait_for(asked, _TIMEOUT_S)
                for one in heard:
                    loads.hear(one, now=time.monotonic())
                has_failed, pause_s = False, _SHARED_S if num_routers > 1 else _ALONE_S
            except (RayError, asyncio.TimeoutError, ValueError) as error:
                if not has_failed:  # once, however long it lasts
                    _log.warning("This router does not hear the others: %r", error)
                actor, has_failed = None, True
            await asyncio.sleep(pause_s)
