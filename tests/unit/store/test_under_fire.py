"""Writers, readers and a shard on one arena, killed and stopped at random moments.

Whatever is killed when: no reader ever sees a wrong byte, what is READY afterwards is right to the
byte, what the dead held comes back, nobody waits for ever, and the next shard takes over.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard, sweep
from kvray.store import Arena
from kvray.store.arena.layout import FREE, READY
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.store.fork_server import Workers
from tests.unit.store.invariants import check_bytes, check_invariants
from tests.unit.store.small_arena import PATIENT_S
from tests.unit.store.stress_worker import (
    LENGTH,
    NUM_CHAINS,
    READ,
    STEPS,
    WRITTEN,
    blocks_of,
    board,
    keys_of,
    shard_settings,
)
from tests.waiting import wait_for

ROLES = ("shard", "read", "read", "write", "write", "both", "both")
"""Of the workers, by their rows on the board."""

KILLS, KILLS_LONG = 60, 520
STOPPED_SHARE, STOPPED_MAX_S = 0.3, 0.3


@pytest.fixture
def node_dir(directory: Path) -> Iterator[Path]:
    yield directory / "kvray-test"
    sweep(directory / "kvray-test")


def test_kills_at_any_moment_lose_nothing_and_spoil_nothing(node_dir: Path) -> None:
    under_fire(node_dir, kills=KILLS, seed=1)


@pytest.mark.long
def test_hundreds_of_kills_lose_nothing_and_spoil_nothing(node_dir: Path) -> None:
    under_fire(node_dir, kills=KILLS_LONG, seed=2)


def under_fire(node_dir: Path, *, kills: int, seed: int) -> None:
    """Kill as often as told, check what is left, and print what happened."""
    with Workers() as workers:
        fire = Fire(workers, node_dir, random.Random(seed))
        epochs = fire.shard_epoch()
        for _ in range(kills):
            fire.next()
        fire.wait_until_all_get_on()
        epochs = fire.shard_epoch() - epochs
        fire.end()
    counts = board(node_dir).sum(axis=0)
    with shard_over(node_dir) as (shard, line):
        figures = check_what_is_left(node_dir, shard, line)
    print(
        f"{fire.kills} kills, {fire.kills['shard']} of them of the shard, which adopted"
        f" {epochs} times; {fire.stops} stops; {figures['repairs']} repairs;"
        f" {counts[READ]} blocks read, {counts[WRITTEN]} written, {figures['blocks']} left"
    )
    assert sum(fire.kills.values()) == kills


class Fire:
    """Workers of every role, of which one after the other is killed and replaced."""

    def __init__(self, workers: Workers, node_dir: Path, rng: random.Random) -> None:
        self.kills = dict.fromkeys(ROLES, 0)
        self.stops = 0
        self._workers = workers
        self._node_dir = node_dir
        self._random = rng
        self._counts = board(node_dir)
        self._stopped: dict[int, float] = {}
        self._pids = {0: self._start(0)}
        wait_for(lambda: self._counts[0, STEPS], "the shard's start")
        self._pids |= {row: self._start(row) for row in range(1, len(ROLES))}

    def next(self) -> None:
        """Let some time go by, sometimes stop somebody meanwhile, then kill somebody."""
        until = time.monotonic() + self._random.uniform(0.005, 0.12)
        if self._random.random() < STOPPED_SHARE:
            self._stop(self._random.randrange(len(ROLES)))
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
            self._wake()
        self._kill(self._random.randrange(len(ROLES)))

    def wait_until_all_get_on(self) -> None:
        """Fail if a worker that runs does nothing any more."""
        self._wake(everybody=True)
        before = self._counts[:, STEPS].copy()
        for row, role in enumerate(ROLES):
            wait_for(lambda row=row: self._counts[row, STEPS] > before[row] + 2, f"{role} {row}")

    def end(self) -> None:
        """Kill all that live, all at once."""
        for pid in self._pids.values():
            self._workers.kill(pid)

    def shard_epoch(self) -> int:
        """Return how often the arena has been adopted."""
        arena = Arena(self._node_dir, lock_wait_s=PATIENT_S)
        epoch = int(arena.stats()["shard_epoch"])
        arena.close()
        return epoch

    def _start(self, row: int) -> int:
        seed = self._random.getrandbits(32)
        return self._workers.start(ROLES[row], self._node_dir, row, seed)

    def _kill(self, row: int) -> None:
        self._stopped.pop(row, None)
        self._workers.kill(self._pids[row])
        self.kills[ROLES[row]] += 1
        self._pids[row] = self._start(row)

    def _stop(self, row: int) -> None:
        os.kill(self._pids[row], signal.SIGSTOP)
        self._stopped[row] = time.monotonic() + self._random.uniform(0, STOPPED_MAX_S)
        self.stops += 1

    def _wake(self, *, everybody: bool = False) -> None:
        now = time.monotonic()
        for row in [row for row, at in self._stopped.items() if everybody or at <= now]:
            del self._stopped[row]
            os.kill(self._pids[row], signal.SIGCONT)


@contextmanager
def shard_over(node_dir: Path) -> Iterator[tuple[Shard, Line]]:
    """Start a shard of this process over what the dead have left."""
    line = Line()
    shard = Shard("after", shard_settings(node_dir), [line.announce])
    shard.start()
    try:
        wait_until_serving(shard)
        yield shard, line
    finally:
        shard.stop(retire=False, timeout_s=PATIENT_S)


def check_what_is_left(node_dir: Path, shard: Shard, line: Line) -> dict[str, Any]:
    """Fail if a byte is wrong, a slot lost, a lease left or a block not announced."""
    arena = Arena(node_dir, lock_wait_s=PATIENT_S)
    states = arena.tables.slot_state
    wait_for(lambda: arena.stats()["holders"] == 0, "the end of the dead's leases")
    wait_for(lambda: set(np.unique(states)) <= {FREE, READY}, "the return of the dead's slots")
    figures = arena.stats()
    assert (figures["leased_blocks"], figures["corrupt"]) == (0, 0)
    assert figures["blocks"] > 0
    with arena.section(PATIENT_S) as entered:  # the shard goes on making room
        assert entered
        check_invariants(arena.tables)
        check_bytes(arena.tables)
        check_contents(arena)
    for number in range(NUM_CHAINS):
        here = arena.match(keys_of(number))
        wait_for(lambda n=number, here=here: line.matched(keys_of(n)) == here, "the announcements")
    shard.clear(PATIENT_S)
    assert not states.any(), "a slot is lost"
    assert arena.stats()["spare_slabs"] == arena.tables.geometry.num_slabs
    arena.close()
    return figures


def check_contents(arena: Arena) -> None:
    """Fail if a READY slot holds anything but the bytes of its key, whatever its checksum says."""
    tables = arena.tables
    rows = {
        key: (number, row)
        for number in range(NUM_CHAINS)
        for row, key in enumerate(keys_of(number))
    }
    assert len(rows) == NUM_CHAINS * LENGTH
    for slot in np.flatnonzero(tables.slot_state == READY).tolist():
        number, row = rows[tables.slot_key[slot].tobytes()]
        slab, at = tables.geometry.place_of(slot)
        right = blocks_of(number)[row]
        assert np.array_equal(tables.rows(slab)[at, : len(right)], right)
