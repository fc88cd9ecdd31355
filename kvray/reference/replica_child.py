"""The child's side of a replica: an engine that answers its parent's calls."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.events.pool_feed import PoolFeed
from kvray.reference.child_process import Pipe, PipeClosed, join_parent
from kvray.reference.output import READY_ID, Call, Output

_SEND_TIMEOUT_S = 30.0
_GRACE_S = 15.0


def serve(start: Callable[..., Any]) -> None:
    """Serve the parent until it closes its pipe, with the engine that `start` makes of its options.

    The engine has `submit`, `cancel` and `close`, as `ReferenceEngine` has. With the option
    `event_host` its KV events are published there; `get_kv_cache_events` and `tokens_per_block`
    are asked for them.
    """
    pipe = join_parent()
    with contextlib.suppress(PipeClosed), contextlib.ExitStack() as opened:
        options = pipe.receive(timeout_s=None)
        event_host = options.pop("event_host", None)
        ready: dict[str, Any] = {"id": READY_ID, "events": None}
        try:
            engine = start(**options)
            opened.callback(engine.close)
            if event_host is not None:
                size = engine.tokens_per_block
                feed = PoolFeed(engine.get_kv_cache_events, block_size=size, host=event_host)
                opened.callback(feed.close)
                ready["events"] = feed.metadata  # what routers are told
        except (KVRayError, TypeError) as error:
            pipe.send({"id": READY_ID, "error": _told(error)}, timeout_s=_SEND_TIMEOUT_S)
            return
        grace = threading.Timer(_GRACE_S, os._exit, (1,))
        grace.daemon = True
        opened.callback(grace.start)
        calls = _Calls(engine, pipe)
        calls.outbox.put(ready)
        while True:
            calls.take(pipe.receive(timeout_s=None))


class _Calls:
    """The open calls; the process's main thread takes them, another one sends the answers.

    These cross from the engine's thread through the outbox, which holds at most one for each token
    of the open calls.
    """

    def __init__(self, engine: Any, pipe: Pipe) -> None:
        self.outbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._engine = engine
        self._pipe = pipe
        self._calls: dict[int, Call] = {}
        threading.Thread(target=self._send, name="kvray-answers", daemon=True).start()

    def take(self, message: dict[str, Any]) -> None:
        """Begin a call, or cancel one."""
        call_id = message["id"]
        if "call" not in message:
            if (open_call := self._calls.get(call_id)) is not None:
                self._engine.cancel(open_call)
            return
        asked = message["call"]
        if asked.pop("is_stream"):
            asked["listener"] = lambda tokens: self.outbox.put({"id": call_id, "tokens": [*tokens]})

        def answer(future: Future[Output]) -> None:
            del self._calls[call_id]
            if (error := future.exception()) is not None:
                self.outbox.put({"id": call_id, "error": _told(error)})
            else:
                self.outbox.put({"id": call_id, "output": future.result()})

        try:
            self._calls[call_id] = call = self._engine.submit(**asked)
        except (KVRayError, UnicodeError) as error:  # or text that its tokenizer cannot write
            self.outbox.put({"id": call_id, "error": _told(error)})
        else:
            call.future.add_done_callback(answer)

    def _send(self) -> None:
        try:
            while True:
                self._pipe.send(self.outbox.get(), timeout_s=_SEND_TIMEOUT_S)
        except PipeClosed:
            os._exit(1)  # the parent is gone, or hears no answer


def _told(error: BaseException) -> KVRayError:
    """Return an error as the parent gets it, without its cause, which may not pickle."""
    kind = ConfigError if isinstance(error, ConfigError | TypeError | UnicodeError) else KVRayError
    return kind(str(error))


def _reference_engine(**options: Any) -> Any:
    from kvray.reference.engine import ReferenceEngine  # late: it imports torch

    return ReferenceEngine(**options)


if __name__ == "__main__":
    serve(_reference_engine)
