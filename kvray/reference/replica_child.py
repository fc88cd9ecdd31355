"""The child's side of a replica: an engine that answers its parent's calls."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.events.pool_feed import PoolFeed
from kvray.reference.child_process import Pipe, PipeClosed, join_parent
from kvray.reference.output import Call

_SEND_TIMEOUT_S = 30.0
_GRACE_S = 15.0


class _Child:
    """Takes calls on one thread, and answers each call on another when it ends.

    The answers cross from the engine's thread through the outbox. It holds at most one for each
    token of the open calls.
    """

    def __init__(self, pipe: Pipe, start: Callable[..., Any]) -> None:
        self._pipe = pipe
        self._start = start
        self._options: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1)
        self._outbox: queue.SimpleQueue[dict[str, Any] | int | None] = queue.SimpleQueue()
        self._calls: dict[int, Call] = {}
        self._engine: Any = None
        self._is_up = threading.Event()
        threading.Thread(target=self._read, name="kvray-parent", daemon=True).start()

    def run(self) -> None:
        options = self._options.get()
        event_host = options.pop("event_host", None)
        try:
            self._engine = self._start(**options)
        except (KVRayError, TypeError) as error:
            self._send(_failure(0, error))
            return
        self._is_up.set()
        with ExitStack() as opened:
            opened.callback(self._engine.close)
            try:
                events = None if event_host is None else self._publish(opened, event_host)
            except KVRayError as error:
                self._send(_failure(0, error))
                return
            self._send({"id": 0, "events": events})
            while (item := self._outbox.get()) is not None:
                self._send(self._answer(item) if isinstance(item, int) else item)

    def _publish(self, opened: ExitStack, host: str) -> dict[str, Any]:
        """Publish the engine's KV events until it ends, and return what routers are told."""
        engine = self._engine
        feed = PoolFeed(engine.get_kv_cache_events, block_size=engine.tokens_per_block, host=host)
        opened.callback(feed.close)
        return feed.metadata

    def _send(self, message: dict[str, Any]) -> None:
        self._pipe.send(message, timeout_s=_SEND_TIMEOUT_S)

    def _answer(self, call_id: int) -> dict[str, Any]:
        try:
            output = self._calls.pop(call_id).result(0)
        except KVRayError as error:
            return _failure(call_id, error)
        return {"id": call_id, "output": output}

    def _read(self) -> None:
        """Take calls; when the parent is gone, end the engine and the process."""
        try:
            self._options.put(self._pipe.receive(timeout_s=None))
            while True:
                message = self._pipe.receive(timeout_s=None)
                self._is_up.wait()
                self._take(message)
        except PipeClosed:
            pass
        if self._engine is None:
            os._exit(1)
        self._outbox.put(None)
        time.sleep(_GRACE_S)
        os._exit(1)

    def _take(self, message: dict[str, Any]) -> None:
        call_id = message["id"]
        if "call" not in message:
            if (open_call := self._calls.get(call_id)) is not None:
                self._engine.cancel(open_call)
            return
        asked = message["call"]
        if asked.pop("is_stream"):

            def listener(tokens: Sequence[int]) -> None:
                self._outbox.put({"id": call_id, "tokens": list(tokens)})

            asked["listener"] = listener
        try:
            call = self._engine.submit(**asked)
        except KVRayError as error:
            self._outbox.put(_failure(call_id, error))
            return
        self._calls[call_id] = call
        call.future.add_done_callback(lambda _: self._outbox.put(call_id))


def _failure(call_id: int, error: Exception) -> dict[str, Any]:
    is_config = isinstance(error, (ConfigError, TypeError))
    return {"id": call_id, "error": str(error), "is_config": is_config}


def serve(start: Callable[..., Any]) -> None:
    """Serve the parent until it closes its pipe, with the engine that `start` makes of its options.

    The engine has `submit`, `cancel` and `close`, as `ReferenceEngine` has. With the option
    `event_host` its KV events are published there; `get_kv_cache_events` and `tokens_per_block`
    are asked for them.
    """
    try:
        _Child(join_parent(), start).run()
    except PipeClosed:
        sys.exit(1)


def _reference_engine(**options: Any) -> Any:
    from kvray.reference.engine import ReferenceEngine  # late: it imports torch

    return ReferenceEngine(**options)


if __name__ == "__main__":
    serve(_reference_engine)
