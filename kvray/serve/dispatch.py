"""Which engine answers a request, what kvray brings there first, and the answer as it comes."""

import asyncio
import logging
import math
import random
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvray.breaker import Breaker
from kvray.client import Client, Prefetched
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import Tokens
from kvray.serve.engine import Forwarded, Head, in_time, replica_name
from kvray.serve.render import Hint
from kvray.serve.routed import Routed
from kvray.serve.settings import Settings
from kvray.trace.spans import current, span

_log = logging.getLogger("ray.serve")

_TAKEN_S = 5.0, 5.0, math.inf
"""How long each engine may take to accept a request; then another one gets it."""
_RETRIES_MAX = 1
"""Other engines that get a request whose engine took it and ended before the first byte."""
_PLACED_S = 1.0
"""A request that has no engine after as long waits for one, and counts as waiting."""
_RIVAL_S = 10.0
"""A second choice begins after as long. Serve's router believes for ten seconds what it last heard
of a replica's queue, and may take one that is frozen; later it asks first."""
_PREFETCH_THREADS = 8
_BREAKERS_MAX = 1024
_GONE = (RayError, RayServeException, StopAsyncIteration, asyncio.TimeoutError)
"""Raised by an answer whose replica has died, also as if it had ended."""


class Prefetcher:
    """Has prompts brought to the node of a replica, within `prefetch_timeout_s`.

    A replica whose tier is late or gone is left alone for a while that doubles, up to seconds;
    meanwhile its requests do not wait. Each has a breaker of its own: one frozen node costs the
    others nothing.
    """

    def __init__(self, settings: Settings) -> None:
        """Use the Ray connection of this process."""
        self._timeout_s = settings.prefetch_timeout_s
        # A call that nobody waits for any more is over soon after.
        timeout = {"ray.timeout_s": self._timeout_s}
        self._client = Client(load_config(settings.kvray_config, overrides=timeout))
        self._threads = ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix="kvray-prefetch")
        self._breaker_of = lru_cache(_BREAKERS_MAX)(lambda replica: Breaker(random.Random()))
        self._warn_once = lru_cache(_BREAKERS_MAX)(
            partial(_log.warning, "kvray does not prefetch a prompt: %s")
        )

    async def bring(self, tokens: Tokens, replica: str, salt: str | None) -> Prefetched | None:
        """Return once the prompt's blocks are where the replica is; None: not waited for."""
        breaker, brought = self._breaker_of(replica), None
        if breaker.state(time.monotonic()) == "open":
            return None
        breaker.begin(time.monotonic())
        # In its thread it belongs to the request's trace, too.
        ask = partial(copy_context().run, self._client.prefetch, tokens, replica=replica, salt=salt)
        asked = asyncio.get_running_loop().run_in_executor(self._threads, ask)
        try:
            brought = await in_time(asked, self._timeout_s)
        except ConfigError as error:  # the tier says it of this request, and is well
            self._warn_once(str(error))
        except (KVRayError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {self._timeout_s} s"
            if not breaker.error:  # once, however long it lasts
                _log.warning("kvray cannot prefetch for %s: %s", replica, reason)
            breaker.fail(time.monotonic(), reason)
            return None
        if breaker.error:
            _log.info("kvray prefetches for %s again", replica)
        breaker.succeed()
        return brought


class RequestError(Exception):
    """An answer of the ingress's own, with an error's status."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Taken(NamedTuple):
    """A request that an engine has taken."""

    name: str
    """The engine's, in kvray."""
    events: Any
    """What `Engine.forward` yields after that."""
    routed: Routed
    cached: int | None
    """Tokens of the prompt that were most likely there; None: not known."""

    async def next(self, deadline: float) -> Any:
        """Return what the engine says next."""
        return await in_time(anext(self.events), deadline - time.monotonic())


class Dispatcher:
    """Hands requests to the replicas of `Engine`: choose one, prefetch there, dispatch.

    Serve's router chooses, and is given the prompt's tokens where they are known.
    """

    def __init__(self, engines: DeploymentHandle[Any], settings: Settings) -> None:
        self._engines: Any = engines.options(method_name="forward", stream=True)
        self._settings = settings
        self._prefetcher = Prefetcher(settings) if settings.prefetch_timeout_s else None
        self._num_queued = 0

    async def forward(
        self, asked: Forwarded, hint: Hint | None
    ) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of one engine's answer, with headers of ours, and its bytes as they come.

        An engine that is gone or silent before it has taken the request is passed over, and so is
        one that ends before the first byte.

        Raises:
            RequestError: no engine takes it, one broke off, or time is up.
        """
        began, about = time.monotonic(), current()
        deadline = began + self._settings.request_timeout_s
        for retries_left in range(_RETRIES_MAX, -1, -1):
            taken = await self._take(asked, hint, deadline)
            has_head = is_over = False
            try:
                head = await taken.next(deadline)
                has_head = True
                yield Head(head.status, [*head.headers, *_noted(taken)])
                chunk = await taken.next(deadline)
                if chunk:
                    if head.is_stream:  # else all of the answer is there with it
                        taken.routed.first_token()
                    first_s = time.monotonic() - began
                    about.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
                    about.add_event("first token")
                while chunk:
                    yield chunk
                    chunk = await taken.next(deadline)
                is_over = True
                return
            except _GONE as error:
                if has_head or not retries_left or isinstance(error, asyncio.TimeoutError):
                    raise _failure(error, taken.name) from error
                _log.warning("%s is gone before it answered; another one is asked", taken.name)
            finally:
                taken.routed.over()
                if not is_over:  # nobody listens any more, or it has failed
                    taken.events.cancel()

    async def _take(self, asked: Forwarded, hint: Hint | None, deadline: float) -> _Taken:
        """Return the engine that takes a request."""
        for patience_s in _TAKEN_S:
            try:
                return await self._try(asked, hint, deadline, patience_s)
            except _GONE as error:
                failure = error
                _log.warning("An engine did not take a request (%r)", error)
            if time.monotonic() >= deadline:
                break
        raise _failure(failure, "The engine") from failure

    async def _try(
        self, asked: Forwarded, hint: Hint | None, deadline: float, patience_s: float
    ) -> _Taken:
        events = None
        try:
            async with self._placed(hint, deadline) as (choice, routed):
                name = replica_name(choice.replica_id)
                cached, num_computed = routed.near_tokens(name), None
                if hint is not None:
                    brought = None
                    if self._prefetcher is not None and name not in routed.here:
                        brought = await self._prefetcher.bring(hint.tokens, name, hint.salt)
                    if brought is not None:
                        cached = max(cached or 0, min(brought.num_tokens, len(hint.tokens)))
                    if cached is not None:
                        num_computed = len(hint.tokens) - cached
                routed.sent(name)
                events = self._engines.dispatch(choice, asked, num_computed)
                left_s = deadline - time.monotonic()
                await in_time(anext(events), min(left_s, patience_s))
        except BaseException as error:  # also while the choice is given back
            if events is not None:
                routed.over()
                if isinstance(error, asyncio.CancelledError | asyncio.TimeoutError):
                    with suppress(*_GONE):  # one that has failed raises its failure again
                        events.cancel()
            raise
        return _Taken(name, events, routed, cached)

    @asynccontextmanager
    async def _placed(self, hint: Hint | None, deadline: float) -> AsyncIterator[Any]:
        """Yield the router's choice, and whom to tell how it turns out; unused ones go back.

        A choice that takes long waits for a free engine: of so many waits, more are refused. Serve
        itself would count those that it is placing right now too, and refuse a burst.
        """
        self._refuse_too_many()
        asked: list[asyncio.Future[Any]] = []
        tried: list[Routed] = []
        async with AsyncExitStack() as held:

            async def choose(seconds: float) -> set[asyncio.Future[Any]]:
                """Ask the router, and wait for what is asked.

                In an empty context, so that Serve takes each choice as a request of its own. Its
                router finds requests that wait by the id of the caller's request. Of two with one
                id only the first is found. The other, also one that was given up, is looked for
                without end by one of the router's tasks, which are two for each replica: soon no
                request gets one (Ray 2.60).
                """
                tried.append(Routed(is_told=hint is not None and hint.is_stream))
                entering = held.enter_async_context(self._choose(hint, tried[-1]))
                asked.append(Context().run(asyncio.ensure_future, entering))
                held.callback(asked[-1].cancel)
                return await wait(seconds)

            async def wait(seconds: float) -> set[asyncio.Future[Any]]:
                left_s = min(seconds, deadline - time.monotonic())
                return (await asyncio.wait(asked, timeout=left_s, return_when=FIRST_COMPLETED))[0]

            with span("route") as route:
                if not (chosen := await choose(_PLACED_S)):
                    self._refuse_too_many()
                    self._num_queued += 1
                    try:
                        chosen = await wait(_RIVAL_S - _PLACED_S)
                        while not chosen and time.monotonic() < deadline:
                            # Serve starts engines for each choice that waits. One that its router
                            # has not looked at can be at no frozen replica, and stays alone.
                            is_seen = self._settings.router == "serve" or tried[0].is_seen
                            chosen = await (choose(math.inf) if is_seen else wait(_PLACED_S))
                    finally:
                        self._num_queued -= 1
                if not chosen:
                    raise asyncio.TimeoutError
                choice, routed = chosen.pop().result()
                name = replica_name(choice.replica_id)
                route.set_attributes({"kvray.replica": name, **routed.about(name)})
            yield choice, routed

    def _refuse_too_many(self) -> None:
        if self._num_queued >= self._settings.queued_max:
            raise RequestError("All engines are full; try later.", status=429, code="overloaded")

    @asynccontextmanager
    async def _choose(self, hint: Hint | None, routed: Routed) -> AsyncIterator[tuple[Any, Routed]]:
        about = {} if hint is None else {"kvray_tokens": hint.tokens, "kvray_salt": hint.salt}
        try:
            async with self._engines.choose_replica(**about, kvray_routed=routed) as choice:
                yield choice, routed
        finally:
            if not routed.is_sent:
                routed.over()


def _noted(taken: _Taken) -> list[tuple[bytes, bytes]]:
    """Return headers that say where an answer comes from, and why from there."""
    route = str(taken.routed.about(taken.name)["kvray.route.reason"])
    current().set_attribute("kvray.replica", taken.name)
    _log.info("to %s by %s; %s tokens are near", taken.name, route, taken.cached)
    noted = [(b"x-kvray-replica", taken.name.encode()), (b"x-kvray-route", route.encode())]
    if taken.cached is not None:
        noted.append((b"x-kvray-cached-tokens", str(taken.cached).encode()))
    return noted


def _failure(error: Exception, name: str) -> RequestError:
    if isinstance(error, asyncio.TimeoutError):
        return RequestError(f"{name} did not answer in time.", status=504, code="timeout")
    return RequestError(f"{name} is gone; try again.", status=503, code="replica_gone")
