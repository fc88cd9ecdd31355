"""A process of a test: evaluates expressions and answers each with its repr.

It is a fork of `fork_server`, which calls `run`; `Child` is the side of the test.
"""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path

from kvray.store import Arena, ArenaOwner
from kvray.store.machine.lock import ArenaLock
from kvray.store.machine.side_file import SideFile
from tests.unit.store import small_arena
from tests.unit.store.fork_server import Workers


class Child:
    """A process that evaluates what it is told; `arena` is the arena in `directory`, if any."""

    def __init__(self, server: Workers, directory: Path) -> None:
        self._server = server
        with Listener() as listener:
            self.pid = server.start(listener.address, directory)
            self._pipe = listener.accept()

    def say(self, line: str) -> str:
        """Have `line` evaluated; return the answer's repr."""
        self._pipe.send(line)
        answer: str = self._pipe.recv()
        return answer

    def tell(self, line: str) -> None:
        """Have `line` evaluated, and wait for nothing: only a kill ends it if it has no end."""
        self._pipe.send(line)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 and reap; twice is fine."""
        if not self._pipe.closed:
            os.kill(self.pid, signal.SIGKILL)
            self.wait_until_killed()

    def wait_until_killed(self) -> None:
        """Wait for somebody's kill -9, and reap."""
        self._pipe.close()
        assert self._server.wait(self.pid) == -signal.SIGKILL


def in_fork(is_fine: Callable[[], object], *, within_s: float = 1.0) -> bool:
    """Return what `is_fine` says in a fork of this process, if it says so in time."""
    pid = os.fork()
    if pid == 0:
        start = time.monotonic()
        os._exit(0 if is_fine() and time.monotonic() - start < within_s else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(args: list[str]) -> None:
    """Evaluate what comes from the address until there is no more: address, directory."""
    address, directory = args[0], Path(args[1])
    scope = {
        "ArenaLock": ArenaLock,
        "ArenaOwner": ArenaOwner,
        "Path": Path,
        "SideFile": SideFile,
        "directory": directory,
        "os": os,
        "signal": signal,
        "small": small_arena,
        "time": time,
    }
    if (directory / "arena").exists():
        scope["arena"] = Arena(directory, lock_wait_s=small_arena.PATIENT_S)
    pipe = Client(address)
    while True:
        line = pipe.recv()
        try:
            answer = repr(eval(line, scope))
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            answer = repr(error)
        pipe.send(answer)
