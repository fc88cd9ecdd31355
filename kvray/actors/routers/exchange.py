"""Routers of several ingresses choose together: one small actor has the load of every replica.

Requests come in bursts. Routers that only told each other afterwards would all take the replica
that was idle before, so a choice is made where all the others are known. Whoever needs the actor
first makes it; it ends with that process, and the next router makes another. A router alone, or
without an answer in time, chooses by what it sent itself.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from kvray.actors.names import routes_namespace
from kvray.routing import Choice, Cost, Place, ReplicaLoads, Survey

_log = logging.getLogger("ray.serve")

_REQUESTS_MAX = 16_384
_ROUTER_S = 10.0
"""A router that was not heard for so long is gone, and its requests with it."""
_FIRST_TOKENS_MAX, _FIRST_TOKENS_S = 4096, 600.0
"""The first tokens that count as the latest."""
_HELLO_S = 1.0
_HELLO_TIMEOUT_S = 5.0
_CHOOSE_S = 0.02
"""How long a choice may take; then the router makes its own."""


class AllLoads:
    """The loads of all routers' requests; the inside of the actor."""

    def __init__(self, **options: Any) -> None:
        """Take `options` as `ReplicaLoads` does."""
        self._loads = ReplicaLoads(**options)
        self._replicas: set[str] = set()
        self._routers: dict[str, float] = {}
        self._requests: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Request -> its router and its replica, the oldest first."""
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_FIRST_TOKENS_MAX)

    def hello(self, router: str, first_tokens: Iterable[float] = ()) -> int:
        """Note that a router lives and its latest first tokens; return how many routers do."""
        now = time.monotonic()
        self._first_tokens.extend((now, seconds) for seconds in first_tokens)
        self._routers[router] = now
        gone = {name for name, at in self._routers.items() if now - at > _ROUTER_S}
        if gone:
            self._routers = {name: at for name, at in self._routers.items() if name not in gone}
            self._end([one for one, (name, _) in self._requests.items() if name in gone])
        return len(self._routers)

    def first_tokens(self) -> list[float]:
        """Return the seconds from a request to its first token, of the last 10 minutes."""
        since = time.monotonic() - _FIRST_TOKENS_S
        return [seconds for at, seconds in self._first_tokens if at >= since]

    def choose(
        self,
        router: str,
        request: str,
        places: Sequence[Place],
        num_tokens: int,
        survey: Survey,
        *,
        is_told: bool,
    ) -> Choice:
        """Return the choice for a prompt, and take it to go there; see `route`."""
        now, names = time.monotonic(), {one.replica for one in places}
        if not names <= self._replicas or len(self._replicas) > 2 * len(names):
            # Routers hear of replicas at different times; those long gone are forgotten.
            many = len(self._replicas) > 2 * len(names)
            self._replicas = names if many else self._replicas | names
            self._loads.retain(self._replicas)
        choice = self._loads.choose(places, num_tokens, survey, now=now)
        self.route(router, request, choice.cost, survey, is_told=is_told)
        return choice

    def route(
        self, router: str, request: str, cost: Cost, survey: Survey, *, is_told: bool
    ) -> None:
        """Note that a request goes to a replica; it may have gone to another one before.

        `is_told`: somebody will say when its first token is there.
        """
        self.hello(router)
        self.withdraw(request)
        if cost.replica in self._replicas:
            self._requests[request] = router, cost.replica
            self._loads.routed(request, cost, survey, now=time.monotonic(), is_told=is_told)
        while len(self._requests) > _REQUESTS_MAX:
            self._end([next(iter(self._requests))])

    def answer(self, request: str) -> None:
        """Note a request's first token."""
        self._loads.first_token(request, time.monotonic())

    def end(self, request: str) -> None:
        """Note a request's end; twice is fine."""
        self._end([request])

    def withdraw(self, request: str) -> None:
        """Note that a request did not go where it was to; twice is fine."""
        self._requests.pop(request, None)
        self._loads.withdraw(request, time.monotonic())

    def _end(self, requests: Iterable[str]) -> None:
        for one in requests:
            if self._requests.pop(one, None) is not None:
                self._loads.done(one, time.monotonic())


class SharedLoads:
    """One router's own loads, and its end of the actor that has all; used by one event loop."""

    def __init__(
        self, name: str, cluster_name: str, first_tokens: Callable[[], list[float]], **options: Any
    ) -> None:
        """Share with routers that give the same `name`, that of the deployment.

        `first_tokens` returns the seconds to each first token since it was called last.
        """
        self.own = ReplicaLoads(**options)
        self._first_tokens = first_tokens
        self._options = options
        self._actor_options: Any = {
            "name": f"kvray-routes-{name}",
            "namespace": routes_namespace(cluster_name),
            "get_if_exists": True,
            "num_cpus": 0,
        }
        self._router = secrets.token_hex(8)
        self._actor: Any = None
        """None: this router is alone, or the actor does not answer."""
        self._elsewhere: dict[str, str] = {}
        """Requests that the actor has, and their replicas."""
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for other routers, once; ends with the loop."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._look())

    async def choose(
        self,
        request: str,
        places: Sequence[Place],
        num_tokens: int,
        survey: Survey,
        *,
        is_told: bool,
    ) -> Choice:
        """Return the choice for a prompt among all routers' requests, or else this one's own."""
        actor = self._actor
        choice: Choice | None = None
        if actor is not None:
            asked = actor.choose.remote(
                self._router, request, places, num_tokens, survey, is_told=is_told
            )
            try:
                with suppress(RayError, asyncio.TimeoutError):
                    choice = await asyncio.wait_for(asked, _CHOOSE_S)
            finally:  # also of a request that is given up, or if this router is alone by now
                if choice is None or self._actor is not actor:
                    actor.withdraw.remote(request)
            if choice is not None and self._actor is actor:
                self._elsewhere[request] = choice.replica
                return choice
        return self.own.choose(places, num_tokens, survey, now=time.monotonic())

    def routed(
        self, request: str, cost: Cost, survey: Survey, *, now: float, is_told: bool
    ) -> None:
        """Note that a request goes to a replica, as `ReplicaLoads.routed`."""
        self.own.routed(request, cost, survey, now=now, is_told=is_told)
        if self._elsewhere.get(request) != cost.replica:
            self._tell("route", self._router, request, cost, survey, is_told=is_told)
            if self._actor is not None:
                self._elsewhere[request] = cost.replica

    def first_token(self, request: str, now: float) -> None:
        """Note that a prompt is computed."""
        self.own.first_token(request, now)
        if request in self._elsewhere:
            self._tell("answer", request)

    def done(self, request: str, now: float) -> None:
        """Note a request's end; twice is fine."""
        self.own.done(request, now)
        if self._elsewhere.pop(request, None) is not None:
            self._tell("end", request)

    def withdraw(self, request: str, now: float) -> None:
        """Note that a request did not go where `routed` said; twice is fine."""
        self.own.withdraw(request, now)
        if self._elsewhere.pop(request, None) is not None:
            self._tell("withdraw", request)

    def _tell(self, method: str, *args: Any, **options: Any) -> None:
        """Call the actor, and wait for nothing."""
        if self._actor is not None:
            getattr(self._actor, method).remote(*args, **options)

    async def _look(self) -> None:
        actor: Any = None
        num_routers, has_failed = 1, False
        times = deque[float](maxlen=_FIRST_TOKENS_MAX)  # what no call has brought yet
        while True:
            times += self._first_tokens()
            try:
                if actor is None:
                    made = ray.remote(AllLoads).options(**self._actor_options)
                    making = asyncio.to_thread(made.remote, **self._options)
                    actor = await asyncio.wait_for(making, _HELLO_TIMEOUT_S)
                asked = actor.hello.remote(self._router, [*times])
                num_routers = await asyncio.wait_for(asked, _HELLO_TIMEOUT_S)
                times.clear()
                has_failed = False
            except (RayError, asyncio.TimeoutError, ValueError) as error:
                if not has_failed:  # once, however long it lasts
                    _log.warning("This router chooses without the others: %r", error)
                actor, has_failed = None, True
            if actor is None or num_routers == 1:
                for request in self._elsewhere:  # nobody else tells the actor of their ends
                    self._tell("end", request)
                self._elsewhere.clear()
                self._actor = None
            else:
                self._actor = actor
            await asyncio.sleep(_HELLO_S)
