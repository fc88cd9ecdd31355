"""Serve's choice of a replica, and a second one when the first does not come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from typing import Any, TypeAlias

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

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
