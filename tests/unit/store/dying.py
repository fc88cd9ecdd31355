"""Processes that kill or stop themselves before their n-th store into an arena.

`run` is a fork of `fork_server`: it opens the arena, prepares what an operation needs, and does it.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvray.store import Arena, ArenaOwner, Lease, Reservation
from kvray.store.arena.tables import Array
from tests.unit.store.small_arena import SLOT, chain, leased, pool_of, reserved
from tests.unit.store.write_log import WatchedTables, Write

TRUNK, NEW = chain(10, seed="trunk"), chain(9, seed="new")


class Life:
    """One fork's arena, and what it has to begin with."""

    lease: Lease
    reservation: Reservation
    checksums: Array

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(directory, lock_wait_s=5)

    def join(self) -> None:
        self.arena.join("dying")

    def take(self) -> None:
        self.join()
        self.lease = leased(self.arena, TRUNK)

    def reserve(self, block_bytes: int = SLOT) -> None:
        made = reserved(self.arena, NEW, parent=TRUNK[-1], depth=10, block_bytes=block_bytes)
        self.reservation, missing = made, [NEW[row] for row in made.rows]
        pool = pool_of(missing, block_bytes=block_bytes)
        self.checksums = self.arena.write(made, pool, np.arange(len(pool)))

    def write(self) -> None:
        self.join()
        self.reserve()

    def take_and_write(self) -> None:
        self.take()
        self.reserve()

    def release(self) -> None:
        assert self.arena.release(self.lease)

    def commit(self) -> None:
        assert self.arena.commit(self.reservation, self.checksums)

    def abort(self) -> None:
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
        arena.tables = WatchedTables(tables.data.base, tables.geometry, self._stored)

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


def run(args: list[str]) -> None:
    """Do an operation, with a signal before its n-th store: directory, name, n, signal."""
    directory, name, number, sent = args
    life = Life(Path(directory))
    prepare, do = OPERATIONS[name]
    prepare(life)
    Fate(life.arena, int(number), signal.Signals[sent])
    do(life)
    life.arena.close()
