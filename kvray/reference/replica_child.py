"""The child's side of a replica, started with two pipe ends, its parent's pid and a flag."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.pipe import JsonPipe, PipeClosed
from kvray.reference.replica import decode_options

if TYPE_CHECKING:
    from kvray.reference.engine import ReferenceEngine

_PR_SET_PDEATHSIG = 1
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


def _die_with(parent_pid: int, *, use_signal: bool) -> None:
    """Ask the kernel for a SIGKILL when the parent's thread ends, unless it has already."""
    if use_signal:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    """Serve the parent until it closes its pipe."""
    read_fd, write_fd, parent_pid, use_signal = map(int, sys.argv[1:5])
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent_pid, use_signal=bool(use_signal))
    try:
        _Child(JsonPipe(read_fd, write_fd)).run()
    except PipeClosed:
        sys.exit(1)


if __name__ == "__main__":
    main()
