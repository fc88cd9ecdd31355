"""Starts workers within milliseconds: forks of a process that has imported all they need.

Run as `python -m tests.unit.store.fork_server`; `Workers` is the side of the test. A worker opens
its arena after the fork, because no lock and no arena outlives one.
"""

import os
import signal
import subprocess
import sys
import traceback
from types import TracebackType

from tests.unit.store import stress_worker
from tests.unit.store.conftest import ROOT


class Workers:
    """A fork server and the workers that live; leaving the `with` block ends all of them."""

    def __init__(self) -> None:
        # Threads of a numeric library would not survive a fork.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.store.fork_server"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()  # it ends with its input

    def start(self, role: str, *args: object) -> int:
        """Start a worker; return its pid."""
        return self._ask("start", role, *args)

    def kill(self, pid: int) -> None:
        """kill -9; fail if the worker had ended before, as it does when it finds a fault."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL, "a worker failed; its traceback is above"

    def wait(self, pid: int) -> int:
        """Wait for a worker's end; return its exit status, or the negative of what killed it."""
        return self._ask("wait", pid)

    def _ask(self, *words: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(*words, file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def main() -> None:
    stress_worker.prepare()
    living: set[int] = set()
    for line in sys.stdin:
        command, *args = line.split()
        if command == "start":
            answer = os.fork() or _work(args)
            living.add(answer)
        else:
            living.discard(int(args[0]))
            answer = os.waitstatus_to_exitcode(os.waitpid(int(args[0]), 0)[1])
        print(answer, flush=True)
    for pid in living:  # also when the test has died
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(args: list[str]) -> int:
    """Run a worker in this fork; never return."""
    status = 1
    try:
        os.dup2(2, 1)  # the server's answers go to the old one
        stress_worker.run(args)
        status = 0
    except BaseException:  # noqa: BLE001 - the fork's end; the test sees its status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
