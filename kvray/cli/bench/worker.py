"""A process of the bench: answers its parent's calls over a pipe, and never outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvray.errors import KVRayError
from kvray.reference.pipe import JsonPipe, PipeClosed

_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 5.0


class Worker:
    """The parent's handle on a process that does `work.Work`."""

    def __init__(self) -> None:
        """Start the process; it is ready when it answers its first call."""
        from_child, child_write = os.pipe()
        child_read, to_child = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(child_read), str(child_write)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(child_read, child_write),
                start_new_session=True,  # Ctrl-C is for the parent, which ends it
            )
        except BaseException:
            os.close(from_child)
            os.close(to_child)
            raise
        finally:
            os.close(child_read)
            os.close(child_write)
        self._pipe = JsonPipe(from_child, to_child)

    def call(self, name: str, **arguments: Any) -> Any:
        """Have the process do something, and return its answer.

        Raises:
            KVRayError: what went wrong there, or its death.
        """
        return call_all([self], name, **arguments)[0]

    def close(self) -> None:
        """End the process. Twice is fine."""
        self._pipe.close()
        self._process.kill()
        self._process.wait(_CLOSE_TIMEOUT_S)

    def send(self, name: str, arguments: dict[str, Any]) -> None:
        """Begin a call."""
        self._pipe.send({"call": name, "arguments": arguments}, timeout_s=_TIMEOUT_S)

    def receive(self) -> Any:
        """Return the answer to the call that was begun."""
        try:
            answer = self._pipe.receive(timeout_s=_TIMEOUT_S)
        except PipeClosed as error:
            raise KVRayError(
                f"A process of the bench has died ({error}); it may have been short of memory:"
                " give a smaller --capacity."
            ) from None
        if "error" in answer:
            raise KVRayError(answer["error"])
        return answer["result"]


def call_all(workers: Sequence[Worker], name: str, **arguments: Any) -> list[Any]:
    """Have all `workers` do the same at once, and return their answers."""
    for worker in workers:
        worker.send(name, arguments)
    return [worker.receive() for worker in workers]


def main() -> None:
    """Serve the parent until it closes its pipe."""
    from kvray.cli.bench.work import Work

    work, pipe = Work(), JsonPipe(*map(int, sys.argv[1:3]))
    try:
        while True:
            call = pipe.receive(timeout_s=None)
            try:
                answer = {"result": getattr(work, call["call"])(**call["arguments"])}
            except KVRayError as error:
                answer = {"error": str(error)}
            pipe.send(answer, timeout_s=_TIMEOUT_S)
    except PipeClosed:
        work.detach()


if __name__ == "__main__":
    main()
