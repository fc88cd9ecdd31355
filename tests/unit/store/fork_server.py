"""Starts workers within milliseconds: forks of a process that has imported all they need.

Run as `python -m tests.unit.store.fork_server MODULE`; `Workers` is the side of the test. A worker
calls `run` of that module, whose `prepare` the server has called. It opens its arena there, because
no lock and no arena outlives a fork.
"""

import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


class Workers:
    """A fork server and the workers that live; leaving the `with` block ends all of them."""

    def __init__(self, module: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.store.fork_server", f"tests.unit.store.{module}"],
            cwd=ROOT,
            # Threads of a numeric library would not survive a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()  # it ends with its input

    def start(self, *args: object) -> int:
        """Start a worker; return its pid."""
        return self._ask("start", *args)

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
    module = importlib.import_module(sys.argv[1])
    if prepare := getattr(module, "prepare", None):
        prepare()
    living: set[int] = set()
    for line in sys.stdin:
        command, *args = line.split()
        if command == "start":
            answer = os.fork() or _work(module, args)
            living.add(answer)
        else:
            pid = int(args[0])
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            living.discard(pid)
        print(int(answer), flush=True)
    for pid in living:  # also when the test has died
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(module: ModuleType, args: list[str]) -> int:
    """Run a worker in this fork; never return."""
    status = 1
    try:
        os.dup2(2, 1)  # the server's answers go to the old one
        module.run(args)
        status = 0
    except BaseException:  # noqa: BLE001 - the fork's end; the test sees its status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
