"""Calls to named actors from an event loop, each with a deadline and kvray's own errors."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from kvray.actors.ray_glue.calls import get_actor, mapped_errors
from kvray.errors import ShardUnavailable

_SEARCHES_MAX = 4
"""Threads that look for an actor; while Ray's head does not answer each takes a minute."""
_HANDLES_MAX = 4096


class ActorCalls:
    """The `Ask` of Ray's actors; used by one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._searches = threading.Semaphore(_SEARCHES_MAX)

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if actor not in self._handles:
                self._handles[actor] = await _in_time(self._search(actor), timeout_s, actor)
                if len(self._handles) > _HANDLES_MAX:
                    del self._handles[next(iter(self._handles))]
            with mapped_errors():
                answer = getattr(self._handles[actor], method).remote(*args).future()
                left_s = deadline - loop.time()
                return await _in_time(asyncio.wrap_future(answer), left_s, actor)
        except ShardUnavailable:
            self._handles.pop(actor, None)  # it may be recreated, under the same name
            raise

    def _search(self, actor: str) -> "asyncio.Future[Any]":
        """Have a thread ask Ray for the handle, which blocks for a minute if its head is gone."""
        if not self._searches.acquire(blocking=False):
            raise ShardUnavailable(
                f"Ray was not asked for {actor}: it has left {_SEARCHES_MAX} such questions without"
                " an answer; see `ray status`."
            )
        # Crosses to the thread, and comes back with the handle. A daemon: whatever becomes of
        # Ray's head, this process can end.
        found: Future[Any] = Future()
        threading.Thread(
            target=self._fulfil, args=(found, actor), name="kvray-search", daemon=True
        ).start()
        return asyncio.wrap_future(found)

    def _fulfil(self, found: "Future[Any]", actor: str) -> None:
        if not found.set_running_or_notify_cancel():
            self._searches.release()
            return
        # The loop that waits may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            try:
                found.set_result(get_actor(actor))
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                found.set_exception(error)
            finally:
                self._searches.release()


async def _in_time(answer: Awaitable[Any], timeout_s: float, actor: str) -> Any:
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except asyncio.TimeoutError:
        raise ShardUnavailable(
            f"{actor} did not answer within {timeout_s:.2f} s; see `kvray status`."
        ) from None
