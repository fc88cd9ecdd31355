"""Staging that nobody waits for: the engine asks again about the request, and schedules others.

For engines that take "ask again" for an answer. Each call has a deadline, and a thread of its own
out of a few; with all of them busy a call waits for its turn, which counts as part of its time.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvray.node import StageCalls, StageReply

_THREADS = 4

Stage = Callable[[StageCalls], StageReply]
"""One call to the shard; raises nothing of the shard's."""


class LateReply(NamedTuple):
    """A reply of the shard."""

    reply: StageReply
    began: float  # when it was asked
    have: int  # leading blocks that were here then


class LateStages:
    """The calls of one leader; used by the engine's executor thread.

    What crosses threads: the calls, and their replies through futures. Each thread has connections
    of its own, which `close` hangs up; a call under way ends by its deadline.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._local = threading.local()
        self._calls: list[StageCalls] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvray-stage")
        self._asked: dict[int, tuple[Future[StageReply], float, int]] = {}

    def begin(self, request_id: int, stage: Stage, *, now: float, have: int) -> None:
        """Have the shard asked for a request; `take` has the reply, with `now` and `have`."""
        self._asked[request_id] = self._threads.submit(self._do, stage), now, have

    def is_pending(self, request_id: int) -> bool:
        """Whether a request has been asked for and has no reply yet."""
        asked = self._asked.get(request_id)
        return asked is not None and not asked[0].done()

    def take(self, request_id: int) -> LateReply | None:
        """Return the reply, once; None: the request has not been asked for."""
        if request_id not in self._asked:
            return None
        reply, began, have = self._asked.pop(request_id)
        return LateReply(reply.result(), began, have)

    def forget(self, request_id: int) -> None:
        """Drop a request's call, if it has not begun, or its reply."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[0].cancel()

    def close(self) -> None:
        """End the threads; nobody waits for the calls that are under way. Twice is fine."""
        for asked, *_ in self._asked.values():
            asked.cancel()
        for calls in self._calls:
            calls.interrupt()
        self._threads.shutdown()
        for calls in self._calls:
            calls.close()

    def _do(self, stage: Stage) -> StageReply:
        calls = getattr(self._local, "calls", None)
        if calls is None:
            calls = self._local.calls = StageCalls(self._directory)
            self._calls.append(calls)
        return stage(calls)
