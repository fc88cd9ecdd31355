"""An object in a process of its own, called over a pipe by several threads at once.

`Far` is the near end. Each call has a deadline, and the process can be frozen and killed.
"""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvray.errors import KVRayError, ShardUnavailable

ROOT = Path(__file__).parents[1]
_THREADS = 32


class Far:
    """What `module:callable` returned in a process of its own."""

    def __init__(self, made_by: str, *args: Any, environ: dict[str, str] | None = None) -> None:
        """Start the process; it calls `made_by` with `args`."""
        near, far = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.far", str(far.fileno()), made_by],
            cwd=ROOT,
            pass_fds=[far.fileno()],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
        far.close()
        self._pipe = near
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._thread = threading.Thread(target=self._receive, name="far", daemon=True)
        self._thread.start()
        self.call("__init__", *args, timeout_s=60)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Return what the method of the far object does; raise what it raises.

        Raises:
            ShardUnavailable: no answer in time, or the process is gone.
        """
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            self._waiting[number] = future
        try:
            with self._lock:
                self._pipe.send((number, method, args))
            return future.result(timeout_s)
        except (FutureTimeoutError, OSError) as error:
            raise ShardUnavailable(f"The far process does not answer ({error!r}).") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 and reap. Twice is fine."""
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self._pipe.close()

    def _receive(self) -> None:
        while True:
            try:
                number, error, answer = self._pipe.recv()
            except (EOFError, OSError):
                break
            future = self._waiting.get(number)
            if future is not None:
                _settle(future, error, answer)
        with self._lock:
            for future in self._waiting.values():
                _settle(future, ShardUnavailable("The far process is gone."), None)


def _settle(future: "Future[Any]", error: KVRayError | None, answer: Any) -> None:
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


class _Server:
    def __init__(self, pipe: Connection, made_by: str) -> None:
        self._pipe = pipe
        module, name = made_by.split(":")
        self._make = getattr(importlib.import_module(module), name)
        self._object: Any = None
        self._lock = threading.Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            while True:
                try:
                    number, method, args = self._pipe.recv()
                except (EOFError, OSError):
                    os._exit(0)  # the test is over, whatever is under way here
                pool.submit(self._answer, number, method, args)

    def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        error, answer = None, None
        try:
            if method == "__init__":
                self._object = self._make(*args)
            else:
                answer = getattr(self._object, method)(*args)
        except KVRayError as raised:
            error = raised
        except Exception as defect:  # noqa: BLE001 - the test wants to see it
            error = KVRayError(f"A defect in the far process: {defect!r}")
        with self._lock:
            self._pipe.send((number, error, answer))


if __name__ == "__main__":
    _Server(Connection(int(sys.argv[1])), sys.argv[2]).run()
