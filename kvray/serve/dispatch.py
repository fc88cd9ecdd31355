"""Which engine answers a request, what kvray brings there first, and the answer as it comes.

A second choice of a replica is made when the first does not come.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import Context, copy_context
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvray.breaker import Breaker
from kvray.client import Client, Prefetched
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import Tokens
from kvray.serve.engine import Forwarded, Head, replica_name
from kvray.serve.render import Hint
from kvray.serve.routed import Routed
from kvray.serve.settings import Settings
from kvray.trace.spans import current, span

Choosing: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]


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

    async def hold(after_s: float, *, is_rival: bool) -> None:
        """Keep a choice to the end of the block; if it is not the first, give it back at once."""
        await asyncio.sleep(after_s)
        try:
            async with choose() as choice:
                if not found.done():
                    found.set_result((choice, asyncio.current_task()))
                    await is_over.wait()
        except Exception as error:  # noqa: BLE001 - it is raised in the block's task
            if not (is_rival or found.done()):
                found.set_exception(error)

    # In empty contexts, so that Serve takes each choice as a request of its own. Its router finds
    # requests that wait by the id of the caller's request. Of two with one id only the first is
    # found. The other, also one that was given up, is looked for without end by one of the router's
    # tasks, which are two for each replica: soon no request gets one (Ray 2.60).
    holds = hold(0.0, is_rival=False), hold(rival_s, is_rival=True)
    holders = [Context().run(asyncio.create_task, one) for one in holds]
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


_log = logging.getLogger("ray.serve")
_TRIES_MAX = 3
"""Engines that are given a request which the ones before did not take."""
_RETRIES_MAX = 1
"""Other engines that get a request whose engine took it and ended before the first byte."""
_TAKE_TIMEOUT_S = 5.0
"""An engine that does not take a request for so long is passed over."""
_PLACED_S = 1.0
"""A request that has no engine after as long waits for one, and counts as waiting."""

_RIVAL_S = 10.0
"""A second choice begins after as long. Serve's router believes for ten seconds what it last heard
of a replica's queue, and may take one that is frozen; later it asks first."""

_PREFETCH_THREADS = 8
_BREAKERS_MAX = 1024

_GONE = (RayError, RayServeException, StopAsyncIteration, asyncio.TimeoutError)
"""Raised by an answer whose replica has died, also as if it had ended."""

REPLICA_HEADER = "x-kvray-replica"
"""In an answer: the engine that gave it, by its name in kvray."""
ROUTE_HEADER = "x-kvray-route"
"""In an answer: why that engine was chosen, one of `routing.choice.REASONS`."""
CACHED_HEADER = "x-kvray-cached-tokens"
"""In an answer: tokens of the prompt that were expected at that engine; its body has a count."""


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

    async def bring(self, tokens: Tokens, replica: str, salt: str | None) -> Prefetched | None:
        """Return once the prompt's blocks are where the replica is; None: not waited for."""
        if self._timeout_s == 0:
            return None
        breaker = self._breaker_of(replica)
        if breaker.state(time.monotonic()) == "open":
            return None
        breaker.begin(time.monotonic())
        # In its thread it belongs to the request's trace, too.
        run, prefetch = copy_context().run, self._client.prefetch
        asked = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: run(prefetch, tokens, replica=replica, salt=salt)
        )
        had_failed, brought = breaker.error, None
        try:
            brought = await asyncio.wait_for(asked, self._timeout_s)
        except ConfigError as error:  # the tier says it of this request, and is well
            self._warn_once(str(error))
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


class RequestError(Exception):
    """An answer of the ingress's own, with an error's status."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Taken(NamedTuple):
    """A request that an engine has taken."""

    name: str
    """The engine's, in kvray."""
    events: Any
    """What `Engine.forward` yields after that."""
    routed: Routed
    cached: int | None
    """Tokens of the prompt that were most likely there; None: not known."""


class Dispatcher:
    """Hands requests to the replicas of `Engine`: choose one, prefetch there, dispatch.

    Serve's router chooses, and is given the prompt's tokens where they are known. Its
    `choose_replica` is new in Ray 2.60 and not stable: a Serve without it chooses as it hands over,
    and nothing is prefetched.
    """

    def __init__(
        self,
        engines: DeploymentHandle[Any],
        prefetcher: Prefetcher,
        *,
        request_timeout_s: float,
        queued_max: int,
    ) -> None:
        # Of the class: a handle has an attribute of any name, for the methods of its deployment.
        self._can_choose = hasattr(type(engines), "choose_replica")
        self._engines: Any = engines.options(method_name="forward", stream=True)
        self._prefetcher = prefetcher
        self._timeout_s = request_timeout_s
        self._queued_max = queued_max
        self._num_queued = 0
        if not self._can_choose:
            _log.warning(
                "This Ray Serve cannot choose a replica before a request is sent, as 2.60 can:"
                " kvray prefetches nothing."
            )

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
        deadline = began + self._timeout_s
        taken, head = await self._begin(asked, hint, deadline)
        is_begun = is_over = False
        try:
            route = str(taken.routed.about(taken.name)["kvray.route.reason"])
            about.set_attribute("kvray.replica", taken.name)
            _log.info("to %s by %s; %s tokens are near", taken.name, route, taken.cached)
            ours = {REPLICA_HEADER: taken.name, ROUTE_HEADER: route}
            if taken.cached is not None:
                ours[CACHED_HEADER] = str(taken.cached)
            added = [(key.encode(), one.encode()) for key, one in ours.items()]
            yield Head(head.status, [*head.headers, *added])
            while chunk := await _next(taken, deadline):
                if not is_begun:
                    is_begun = True
                    taken.routed.first_token()
                    first_s = time.monotonic() - began
                    about.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
                    about.add_event("first token")
                yield chunk
            is_over = True
        finally:
            taken.routed.over()
            if not is_over:  # nobody listens any more, or it has failed
                taken.events.cancel()

    async def _begin(
        self, asked: Forwarded, hint: Hint | None, deadline: float
    ) -> tuple[Taken, Head]:
        """Return the engine that answers a request, and the answer's head."""
        tries_left, retries_left = _TRIES_MAX, _RETRIES_MAX
        while True:
            tries_left -= 1
            try:
                taken = await self._try(asked, hint, deadline, is_last=not tries_left)
            except _GONE as error:
                if not tries_left or time.monotonic() >= deadline:
                    raise _failure(error, "The engine") from error
                _log.warning("An engine did not take a request (%r); another one gets it", error)
                continue
            try:
                return taken, await _next(taken, deadline)
            except BaseException as error:
                taken.routed.over()
                taken.events.cancel()
                is_gone = isinstance(error, RequestError) and error.code == "replica_gone"
                if not (is_gone and retries_left):
                    raise
            tries_left, retries_left = _TRIES_MAX, retries_left - 1
            _log.warning("%s is gone before it answered; another one is asked", taken.name)

    async def _try(
        self, asked: Forwarded, hint: Hint | None, deadline: float, *, is_last: bool
    ) -> Taken:
        routed, cached, num_computed = Routed(), None, None
        async with AsyncExitStack() as chosen:  # a choice that is not used is given back
            if self._can_choose:
                choice, routed = await self._placed(chosen, hint, deadline)
                name = replica_name(choice.replica_id)
                cached, brought = routed.near_tokens(name), None
                if hint is not None and choice.replica_id not in routed.here:
                    brought = await self._prefetcher.bring(hint.tokens, name, hint.salt)
                if hint is not None and brought is not None:
                    cached = max(cached or 0, min(brought.num_tokens, len(hint.tokens)))
                if hint is not None and cached is not None:
                    num_computed = len(hint.tokens) - cached
                routed.sent(choice.replica_id)
                events = self._engines.dispatch(choice, asked, num_computed)
            else:
                events = self._engines.remote(asked)
            patience_s = deadline - time.monotonic()
            if self._can_choose and not is_last:  # else the wait for a free engine is part of it
                patience_s = min(patience_s, _TAKE_TIMEOUT_S)
            try:
                name = await asyncio.wait_for(anext(events), patience_s)
            except BaseException as error:
                routed.over()
                if isinstance(error, asyncio.CancelledError | asyncio.TimeoutError):
                    events.cancel()  # of what has failed it would raise the failure again
                raise
        return Taken(name, events, routed, cached)

    async def _placed(
        self, chosen: AsyncExitStack, hint: Hint | None, deadline: float
    ) -> tuple[Any, Routed]:
        """Return the router's choice, which is held until `chosen` ends.

        A choice that takes long waits for a free engine: of so many waits, more are refused. Serve
        itself would count those that it is placing right now too, and refuse a burst.
        """
        self._refuse_too_many()
        left_s = deadline - time.monotonic()
        choosing = first_choice(partial(self._choose, hint), rival_s=_RIVAL_S, timeout_s=left_s)
        with span("route") as route:
            entering = asyncio.ensure_future(chosen.enter_async_context(choosing))
            try:
                if not (await asyncio.wait({entering}, timeout=_PLACED_S))[0]:
                    self._refuse_too_many()
                    self._num_queued += 1
                    try:
                        await asyncio.wait({entering})
                    finally:
                        self._num_queued -= 1
                choice, routed = entering.result()
            except BaseException:
                entering.cancel()
                await asyncio.wait({entering})
                raise
            name = replica_name(choice.replica_id)
            route.set_attributes({"kvray.replica": name, **routed.about(name)})
        return choice, routed

    def _refuse_too_many(self) -> None:
        if self._num_queued >= self._queued_max:
            raise RequestError("All engines are full; try later.", status=429, code="overloaded")

    @asynccontextmanager
    async def _choose(self, hint: Hint | None) -> AsyncIterator[Any]:
        """Yield a choice, and whom to tell how it turned out."""
        routed = Routed()
        about = {} if hint is None else {"kvray_tokens": hint.tokens, "kvray_salt": hint.salt}
        choosing = self._engines.choose_replica(**about, kvray_routed=routed)
        try:
            async with choosing as choice:
                yield choice, routed
        finally:
            if not routed.is_sent:
                routed.over()


async def _next(taken: Taken, deadline: float) -> Any:
    """Return what an engine that has taken a request says next.

    Raises:
        RequestError: the engine broke off, or time is up.
    """
    try:
        return await asyncio.wait_for(anext(taken.events), deadline - time.monotonic())
    except _GONE as error:
        raise _failure(error, taken.name) from error


def _failure(error: Exception, name: str) -> RequestError:
    if isinstance(error, asyncio.TimeoutError):
        return RequestError(f"{name} did not answer in time.", status=504, code="timeout")
    return RequestError(f"{name} is gone; try again.", status=503, code="replica_gone")
