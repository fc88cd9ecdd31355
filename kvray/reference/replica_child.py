"""The child's side of a replica."""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import join_parent
from kvray.reference.engine_options import decode_options
from kvray.reference.pipe import JsonPipe, PipeClosed

if TYPE_CHECKING:
    from kvray.reference.engine import ReferenceEngine

_SEND_TIMEOUT_S = 30.0
_GRACE_S = 15.0


class _Child:
    """Answers one message after the other. The inbox crosses from the reader to this thread."""

    def __init__(self, pipe: JsonPipe) -> None:
        self._pipe = pipe
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=64)
        self._engine: ReferenceEngine | None = None
        threading.Thread(target=self._read, name="kvray-parent", daemon=True).start()

    def run(self) -> None:
        options = self._inbox.get()
        if options is None:
            return
        try:
            self._engine = _start_engine(options)
        except (KVRayError, TypeError) as error:
            self._send_error(0, error)
            return
        with self._engine as engine:
            self._pipe.send({"id": 0}, timeout_s=_SEND_TIMEOUT_S)
            while (message := self._inbox.get()) is not None:
                try:
                    self._answer(engine, message)
                except KVRayError as error:
                    self._send_error(message["id"], error)

    def _answer(self, engine: ReferenceEngine, message: dict[str, Any]) -> None:
        outputs = engine.generate(**message["call"])
        is_single = not isinstance(outputs, list)
        plain = [dataclasses.asdict(item) for item in ([outputs] if is_single else outputs)]
        answer = {"id": message["id"], "outputs": [is_single, plain]}
        self._pipe.send(answer, timeout_s=_SEND_TIMEOUT_S)

    def _send_error(self, call_id: int, error: Exception) -> None:
        is_config = isinstance(error, (ConfigError, TypeError))
        answer = {"id": call_id, "error": str(error), "is_config": is_config}
        self._pipe.send(answer, timeout_s=_SEND_TIMEOUT_S)

    def _read(self) -> None:
        """Hand messages over; when the parent is gone, end what runs, and the process with it."""
        try:
            while True:
                self._inbox.put(self._pipe.receive(timeout_s=None))
        except PipeClosed:
            pass
        self._inbox.put(None)
        if self._engine is None:
            os._exit(1)
        try:
            self._engine.close()
        except KVRayError as error:
            print(error, file=sys.stderr, flush=True)
        time.sleep(_GRACE_S)
        os._exit(1)


def _start_engine(options: dict[str, Any]) -> ReferenceEngine:
    from kvray.reference.engine import ReferenceEngine

    return ReferenceEngine(**decode_options(options))


def main() -> None:
    """Serve the parent until it closes its pipe."""
    try:
        _Child(join_parent()).run()
    except PipeClosed:
        sys.exit(1)


if __name__ == "__main__":
    main()
