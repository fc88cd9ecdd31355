"""Processes that kill or stop themselves before their n-th store into an arena.

Run as `python -m tests.unit.store.dying DIRECTORY`. Each line on the standard input is `operation
n signal`: a fork opens the arena, prepares what the operation needs, and does it. The answer is
`killed`, `finished` (after fewer than n stores), or `stopped PID`, which goes on after the line
`continue PID`. `Dying` is the side of the test.
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvray.store import Arena, ArenaOwner, Lease, Reservation
from tests.unit.store.conftest import ROOT
from tests.unit.store.small_arena import SLOT, chain, pool_of
from tests.unit.store.write_log import WatchedTables, Write

TRUNK, NEW = chain(10, seed="trunk"), chain(9, seed="new")
LABEL = "dying"


class Dying:
    """The process that forks; leave the `with` block to end it."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.store.dying", str(directory)],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Dying":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def say(self, *words: object) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().split()


class Life:
    """One fork's arena, and what it has to begin with."""

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(directory, lock_wait_s=5)
        self.lease: Lease | None = None
        self.reservation: Reservation | None = None
        self.checksums = np.empty(0, dtype="<u8")

    def join(self) -> None:
        self.arena.join(LABEL)

    def take(self) -> None:
        self.join()
        leases = self.arena.lease(TRUNK)
        assert leases
        self.lease = leases[0]

    def reserve(self, block_bytes: int = SLOT) -> None:
        made = self.arena.reserve(NEW, parent=TRUNK[-1], depth=10, part=0, block_bytes=block_bytes)
        assert made is not None
        self.reservation = made
        pool = pool_of([NEW[row] for row in made.rows], block_bytes=block_bytes)
        self.checksums = self.arena.write(made, pool, np.arange(len(pool)))

    def write(self) -> None:
        self.join()
        self.reserve()

    def take_and_write(self) -> None:
        self.take()
        self.reserve()

    def release(self) -> None:
        assert self.lease is not None
        assert self.arena.release(self.lease)

    def commit(self) -> None:
        assert self.reservation is not None
        assert self.arena.commit(self.reservation, self.checksums)

    def abort(self) -> None:
        assert self.reservation is not None
        assert self.arena.abort(self.reservation)

    def quarantine(self) -> None:
        tables = self.arena.tables
        self.arena.quarantine(np.flatnonzero((tables.slot_state == 2) & (tables.slot_leases == 0)))


Step = Callable[[Life], object]

OPERATIONS: dict[str, tuple[Step, Step]] = {
    "join": (lambda life: None, Life.join),
    "lease": (Life.join, lambda life: life.arena.lease(TRUNK)),
    "lease-slots": (Life.join, lambda life: life.arena.lease_slots(np.arange(64))),
    "release": (Life.take, Life.release),
    "reserve": (Life.join, Life.reserve),
    "reserve-large": (Life.join, lambda life: life.reserve(4 * SLOT)),
    "commit": (Life.write, Life.commit),
    "abort": (Life.write, Life.abort),
    "leave": (Life.take_and_write, lambda life: life.arena.leave()),
    "quarantine": (Life.join, Life.quarantine),
    "bury": (Life.join, lambda life: ArenaOwner(life.arena).bury_dead(limbo_s=0)),
    "evict": (Life.join, lambda life: ArenaOwner(life.arena).evict_ahead(0.5)),
    "clear": (Life.join, lambda life: ArenaOwner(life.arena).clear()),
    "adopt": (Life.take_and_write, lambda life: ArenaOwner(life.arena).adopt()),
    "mend": (Life.take_and_write, lambda life: ArenaOwner(life.arena).mend()),
}
"""Name -> what is prepared, and what is done."""


class Fate:
    """Sends this process a signal before its n-th store, of which no byte is to be seen yet."""

    def __init__(self, arena: Arena, number: int, sent: signal.Signals) -> None:
        tables = arena.tables
        self._left = number
        self._sent = sent
        self._memory = memoryview(tables.data.base)[: tables.geometry.offsets()["data"]]
        self._before = bytearray(self._memory)
        arena._tables = WatchedTables(tables.data.base, tables.geometry, self._stored)

    def _stored(self, stores: list[Write]) -> None:
        if self._left <= len(stores):
            late = stores[self._left - 1 :]
            for at, value in late:
                self._memory[at : at + len(value)] = self._before[at : at + len(value)]
            self._left = sys.maxsize
            os.kill(os.getpid(), self._sent)
            for at, value in late:
                self._memory[at : at + len(value)] = value
        self._left -= len(stores)
        for at, value in stores:
            self._before[at : at + len(value)] = value


def live(directory: Path, name: str, number: int, sent: signal.Signals) -> None:
    life = Life(directory)
    prepare, do = OPERATIONS[name]
    prepare(life)
    Fate(life.arena, number, sent)
    do(life)
    life.arena.close()


def main() -> None:
    directory = Path(sys.argv[1])
    for line in sys.stdin:
        words = line.split()
        if words[0] == "continue":
            pid = int(words[1])
            os.kill(pid, signal.SIGCONT)
        else:
            pid = os.fork() or _fork(directory, *words)
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            print("stopped", pid, flush=True)
        elif os.WIFSIGNALED(status):
            print("killed", flush=True)
        else:
            print("finished" if status == 0 else "failed", flush=True)


def _fork(directory: Path, name: str, number: str, sent: str) -> int:
    """Live in this fork; never return."""
    status = 1
    try:
        live(directory, name, int(number), signal.Signals[sent])
        status = 0
    except BaseException:  # noqa: BLE001 - the fork's end; the test sees its status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
