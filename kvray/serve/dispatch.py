"""Which engine answers a request, what kvray brings there first, and the answer as it comes.

A second choice of a replica is made when the first does not come.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import Context, copy_context
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from kvray.breaker import Breaker
from kvray.client import Client, Prefetched
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import pack_tokens
from kvray.serve.engine import replica_name
from kvray.serve.protocol import RequestError
from kvray.serve.router import Routed
from kvray.serve.settings import Settings
from kvray.serve.traced import AnswerSpan, Event
from kvray.trace.spans import current, span, traceparent

Choosing: TypeAlias = "Callable[[], AbstractAsyncContextManager[Any]]"


@asynccontextmanager
async def first_choice(choose: Choosing, *, rival_s: float, timeout_s: float) -> AsyncIterator[Any]:
    """Yield what `choose` gives first: now, or when it is asked again after `rival_s`.

    The other choice is given back when it comes, and the first one at the end of the block. A
    second choice that fails changes nothing.

    Raises:
        asyncio.TimeoutError: no choice came within `timeout_s`.
    """
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()

    def fail(task: "asyncio.Task[None]") -> None:
        if not (found.done() or task.cancelled()) and (error := task.exception()) is not None:
            found.set_exception(error)

    async def rival() -> None:
        await asyncio.sleep(rival_s)
        with contextlib.suppress(RayError, RayServeException):
            await _hold(choose(), found, is_over)

    holders = [_start(_hold(choose(), found, is_over)), _start(rival())]
    holders[0].add_done_callback(fail)
    holding = None
    try:
        choice, holding = await asyncio.wait_for(found, timeout_s)
        yield choice
    finally:
        is_over.set()
        found.cancel()
        for task in holders:
            if task is not holding:
                task.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


def _start(choosing: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task in an empty context, so that Serve takes its choice as a request of its own.

    Serve's router finds requests that wait by the id of the caller's request. Of two with one id
    only the first is found. The other, also one that was given up, is looked for without end by one
    of the router's tasks, which are two for each replica: soon no request gets one (Ray 2.60).
    """
    return Context().run(asyncio.create_task, choosing)


async def _hold(
    choosing: AbstractAsyncContextManager[Any], found: "asyncio.Future[Any]", is_over: asyncio.Event
) -> None:
    """Keep a choice until `is_over`; one that is not the first is given back at once."""
    async with choosing as choice:
        if not found.done():
            found.set_result((choice, asyncio.current_task()))
            await is_over.wait()


_log = logging.getLogger("ray.serve")
_TRIES_MAX = 3
"""Engines that are given a request which the ones before did not take."""
_TAKE_TIMEOUT_S = 5.0
"""An engine that does not take a request for so long is passed over."""
_HEARD_S = 5.0
"""An engine that was heard so lately can answer; else one is asked."""
_HEALTH_TIMEOUT_S = 2.0

_RIVAL_S = 10.0
"""A second choice begins after as long. Serve's router believes for ten seconds what it last heard
of a replica's queue, and may take one that is frozen; later it asks first."""

_PREFETCH_THREADS = 8
_BREAKERS_MAX = 1024

_GONE = (RayError, RayServeException, StopAsyncIteration, asyncio.TimeoutError)
"""Raised by an answer whose replica has died, also as if it had ended."""

_HERE = Prefetched(num_tokens=0, staged_tokens=0, reason="none")
"""In place of a prefetch that would find everything in the node's memory."""


class Prefetcher:
    """Has prompts brought to the node of a replica, within `prefetch_timeout_s`.

    A replica whose tier is late or gone is left alone for a while that doubles, up to seconds;
    meanwhile its requests do not wait. Each has a breaker of its own: one frozen node costs the
    others nothing.
    """

    def __init__(self, settings: Settings) -> None:
        """Use the Ray connection of this process."""
        self._timeout_s = settings.prefetch_timeout_s
        if self._timeout_s == 0:
            return
        # A call that nobody waits for any more is over soon after.
        timeout = {"ray.timeout_s": self._timeout_s}
        self._client = Client(load_config(settings.kvray_config, overrides=timeout))
        self._threads = ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix="kvray-prefetch")
        self._breaker_of = lru_cache(_BREAKERS_MAX)(lambda replica: Breaker(random.Random()))
        self._warn_once = lru_cache(_BREAKERS_MAX)(
            partial(_log.warning, "kvray does not prefetch a prompt: %s")
        )

    async def bring(
        self, tokens: Sequence[int], replica: str, salt: str | None
    ) -> Prefetched | None:
        """Return once the prompt's blocks are where the replica is; None: not waited for."""
        if self._timeout_s == 0:
            return None
        breaker = self._breaker_of(replica)
        if breaker.state(time.monotonic()) == "open":
            return None
        try:
            packed = pack_tokens(tokens)
        except ConfigError:  # nobody is asked, and the engine refuses it with a sentence
            return None
        breaker.begin(time.monotonic())
        # In its thread it belongs to the request's trace, too.
        run, prefetch = copy_context().run, self._client.prefetch
        asked = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: run(prefetch, packed, replica=replica, salt=salt)
        )
        had_failed = breaker.error
        try:
            brought = await asyncio.wait_for(asked, self._timeout_s)
        except ConfigError as error:  # the tier says it of this request, and is well
            breaker.succeed()
            self._warn_once(str(error))
            return None
        except (KVRayError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {self._timeout_s} s"
            breaker.fail(time.monotonic(), reason)
            if not had_failed:  # once, however long it lasts
                _log.warning("kvray cannot prefetch for %s: %s", replica, reason)
            return None
        breaker.succeed()
        if had_failed:
            _log.info("kvray prefetches for %s again", replica)
        return brought


class GenerateArgs(NamedTuple):
    """The arguments of `Engine.generate`."""

    tokens: list[int]
    max_tokens: int
    salt: str | None = None


class Dispatcher:
    """Hands requests to the replicas of `Engine`: choose one, prefetch there, dispatch.

    Serve's router chooses, and is given the prompt's tokens. Its `choose_replica` is new in Ray
    2.60 and not stable: a Serve without it chooses as it hands over, and nothing is prefetched.
    """

    def __init__(
        self, engines: DeploymentHandle[Any], prefetcher: Prefetcher, *, request_timeout_s: float
    ) -> None:
        # Of the class: a handle has an attribute of any name, for the methods of its deployment.
        self._can_choose = hasattr(type(engines), "choose_replica")
        self._engines: Any = engines.options(method_name="generate", stream=True)
        self._health = engines.options(method_name="check_health")
        self._prefetcher = prefetcher
        self._timeout_s = request_timeout_s
        self._heard_at = -_HEARD_S  # of any engine
        if not self._can_choose:
            _log.warning(
                "This Ray Serve cannot choose a replica before a request is sent, as 2.60 can:"
                " kvray prefetches nothing."
            )

    def answer(self, asked: GenerateArgs) -> AsyncGenerator[Event, None]:
        """Yield what the `generate` of one engine yields.

        An engine that is gone or silent before it has taken the request is passed over.

        Raises:
            RequestError: no engine takes it, one refused it or broke off, or time is up.
        """
        events, span = self._answer(asked), current()
        return AnswerSpan(span).along(events) if span.is_recording() else events

    async def _answer(self, asked: GenerateArgs) -> AsyncGenerator[Event, None]:
        deadline = time.monotonic() + self._timeout_s
        taken, events, routed, brought = await self._hand_over(asked, deadline)
        is_over = False
        try:
            route = routed.about(taken["engine"])["kvray.route.reason"]
            _log.debug("%s has taken a request: %s", taken["engine"], route)
            yield {**taken, "route": route}
            while not is_over:
                event = await _next(events, taken["engine"], deadline)
                self._heard_at = time.monotonic()
                if "tokens" in event:
                    routed.first_token()
                is_over = "finish_reason" in event
                yield _by_source(event, brought) if is_over else event
        finally:
            routed.over()
            if not is_over:  # nobody listens any more
                events.cancel()

    async def can_answer(self) -> bool:
        """Whether an engine has said something just now, or says that it is well."""
        if time.monotonic() - self._heard_at < _HEARD_S:
            return True  # all of them may be full, and those that are full are not asked
        for _ in range(_TRIES_MAX):
            asked: Any = self._health.remote()
            try:
                await asyncio.wait_for(asked, _HEALTH_TIMEOUT_S)
                return True
            except asyncio.TimeoutError:
                asked.cancel()
            except (RayError, RayServeException) as error:
                _log.warning("an engine is not well: %r", error)
        return False

    async def _hand_over(
        self, asked: GenerateArgs, deadline: float
    ) -> tuple[Event, Any, Routed, Prefetched | None]:
        """Return the first event of the engine that has taken the request, and those to come."""
        tries_left = _TRIES_MAX
        while True:
            tries_left -= 1
            try:
                return await self._try(asked, deadline, is_last=not tries_left)
            except _GONE as error:
                is_full = isinstance(error, BackPressureError)
                if is_full or not tries_left or time.monotonic() >= deadline:
                    raise _failure(error, "The engine") from error
                _log.warning("An engine did not take a request (%r); another one gets it", error)

    async def _try(
        self, asked: GenerateArgs, deadline: float, *, is_last: bool
    ) -> tuple[Event, Any, Routed, Prefetched | None]:
        async with AsyncExitStack() as chosen:  # a choice that is not used is given back
            routed = Routed()
            brought: Prefetched | None = None
            if self._can_choose:
                choose = partial(self._choose, asked)
                timeout_s = deadline - time.monotonic()
                choosing = first_choice(choose, rival_s=_RIVAL_S, timeout_s=timeout_s)
                with span("route") as route:
                    choice, routed = await chosen.enter_async_context(choosing)
                    name = replica_name(choice.replica_id)
                    route.set_attributes({"kvray.replica": name, **routed.about(name)})
                is_here = choice.replica_id in routed.here
                brought = _HERE if is_here else None
                if not is_here:
                    found = await self._prefetcher.bring(asked.tokens, name, asked.salt)
                    brought = found or brought
                routed.sent(choice.replica_id)
                events = self._engines.dispatch(choice, *asked, **_trace())
            else:
                events = self._engines.remote(*asked, **_trace())
            patience_s = deadline - time.monotonic()
            if self._can_choose and not is_last:  # else the wait for a free engine is part of it
                patience_s = min(patience_s, _TAKE_TIMEOUT_S)
            try:
                taken = await asyncio.wait_for(anext(events), patience_s)
                return taken, events, routed, brought
            except BaseException as error:
                routed.over()
                if isinstance(error, asyncio.CancelledError | asyncio.TimeoutError):
                    events.cancel()  # of what has failed it would raise the failure again
                raise

    @asynccontextmanager
    async def _choose(self, asked: GenerateArgs) -> AsyncIterator[Any]:
        """Yield a choice, and whom to tell how it turned out."""
        routed = Routed()
        choosing = self._engines.choose_replica(*asked, kvray_salt=asked.salt, kvray_routed=routed)
        try:
            async with choosing as choice:
                yield choice, routed
        finally:
            if not routed.is_sent:
                routed.over()


async def _next(events: Any, name: str, deadline: float) -> Event:
    """Return what an engine that has taken a request says next.

    Raises:
        RequestError: the engine refused it, broke off, or time is up.
    """
    try:
        event: Event = await asyncio.wait_for(anext(events), deadline - time.monotonic())
    except _GONE as error:
        raise _failure(error, name) from error
    if "error" in event:
        raise RequestError(event["error"], status=400 if event["is_config"] else 500)
    return event


def _trace() -> dict[str, str]:
    """Return the argument with which an engine that makes spans itself knows their parent."""
    return {"trace": trace} if (trace := traceparent()) else {}


def _by_source(ending: Event, brought: Prefetched | None) -> Event:
    """Return an answer's end with its tokens by source, as far as engine and prefetch say."""
    counts = ending.get("cached_tokens_by_source")
    if counts is None or brought is None:
        return ending
    at, end = counts["pool"], counts["pool"] + counts["tier"]
    found = {"pool": counts["pool"], "host": 0, "disk": 0, "remote": 0}
    for stop, source in (*brought.sources, (end, "host")):  # what came later was there at last
        found[source] += max(0, min(stop, end) - at)
        at = max(at, stop)
    return {**ending, "cached_tokens_by_source": found}


def _failure(error: Exception, name: str) -> RequestError:
    if isinstance(error, BackPressureError):
        return RequestError("All engines are full; try later.", status=429, code="overloaded")
    if isinstance(error, asyncio.TimeoutError):
        return RequestError(f"{name} did not answer in time.", status=504, code="timeout")
    return RequestError(f"{name} is gone; try again.", status=503, code="replica_gone")
