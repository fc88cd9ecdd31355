"""Calls to named actors from an event loop, each with a deadline and kvray's own errors."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from kvray.actors.ray_glue.calls import get_actor, mapped_errors
from kvray.errors import ShardUnavailable

_SEARCHES_MAX = 4
"""Threads that look for actors; while Ray's head does not answer, each look-up takes a minute."""
_HANDLES_MAX = 4096


class ActorCalls:
    """The `Ask` of Ray's actors; used by one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._searches = ThreadPoolExecutor(_SEARCHES_MAX, "kvray-search")

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if actor not in self._handles:
                # In the thread, too, the tier is meant that is meant here.
                search = asyncio.wrap_future(
                    self._searches.submit(copy_context().run, get_actor, actor)
                )
                self._handles[actor] = await _in_time(search, timeout_s, actor)
                if len(self._handles) > _HANDLES_MAX:
                    del self._handles[next(iter(self._handles))]
            with mapped_errors():
                answer = getattr(self._handles[actor], method).remote(*args).future()
                left_s = deadline - loop.time()
                return await _in_time(asyncio.wrap_future(answer), left_s, actor)
        except ShardUnavailable:
            self._handles.pop(actor, None)  # it may be recreated, under the same name
            raise


async def _in_time(answer: Awaitable[Any], timeout_s: float, actor: str) -> Any:
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except asyncio.TimeoutError:
        raise ShardUnavailable(
            f"{actor} did not answer within {timeout_s:.2f} s; see `kvray status`."
        ) from None
