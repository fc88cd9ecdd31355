"""Processes on one arena that are killed and stopped at random moments.

Whatever is killed when: no reader ever sees a wrong byte, what is READY afterwards is right to the
byte, what the dead held comes back, nobody waits for ever, and the next shard takes over.

Every worker has a row on a board in shared memory, where it counts what it did; a worker that is
started in the place of a dead one goes on with its row.
"""

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard, sweep
from kvray.config import ArenaConfig, ShardConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena
from kvray.store.arena.layout import FREE, READY
from kvray.store.arena.tables import Array
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.store.fork_server import Workers
from tests.unit.store.invariants import check_contents, check_invariants
from tests.unit.store.small_arena import PATIENT_S, SLOT, chain, num_here, pool_of, spec
from tests.waiting import wait_for

BLOCK_BYTES = (SLOT, SLOT, 3 * SLOT, 8 * SLOT)
"""Of the chains, in turn."""

NUM_CHAINS = 12
LENGTH = 256
"""Of a chain. All of them have four times the bytes of the arena, so that it is always full."""

ROLES = ("shard", "read", "read", "write", "write", "both", "both")
"""Of the workers, by their rows on the board."""

STEPS, READ, WRITTEN = range(3)
"""Columns of the board: operations done, blocks read and compared, blocks committed."""


def shard_settings(directory: Path) -> ShardSettings:
    """Return the settings of a shard that buries within milliseconds."""
    return ShardSettings(
        directory=directory,
        spec=spec(num_slabs=48, slots_per_slab=64, holders_max=32),
        arena=ArenaConfig(limbo_s=0.1),
        shard=ShardConfig(announce_s=0.01, heartbeat_s=0.05),
    )


def board(directory: Path) -> Array:
    """Map the board of the workers of `directory`, which is made empty if it is not there."""
    path = directory.parent / "board"
    if not path.exists():
        path.write_bytes(bytes(32 * 3 * 8))
    return np.memmap(path, dtype=np.int64, mode="r+", shape=(32, 3))


@cache
def chain_of(number: int) -> tuple[list[BlockKey], Array]:
    """Return the keys of a chain and their only right content, one row a key."""
    keys = chain(LENGTH, seed=f"stress {number}")
    return keys, pool_of(keys, block_bytes=BLOCK_BYTES[number % len(BLOCK_BYTES)])


@pytest.fixture
def node_dir(directory: Path) -> Iterator[Path]:
    yield directory / "kvray-test"
    sweep(directory / "kvray-test")


@pytest.mark.parametrize(("kills", "seed"), [(40, 1), pytest.param(520, 2, marks=pytest.mark.long)])
def test_kills_at_any_moment_lose_and_spoil_nothing(node_dir, kills, seed):
    with Workers("test_stress") as workers:
        fire = Fire(workers, node_dir, random.Random(seed))
        for _ in range(kills):
            fire.next()
        fire.wait_until_all_get_on()
        fire.end()
    assert board(node_dir).sum(axis=0).all(), "blocks were read and written"
    line = Line()
    shard = line.follow(Shard("after", shard_settings(node_dir)))
    shard.start()
    try:
        wait_until_serving(shard)
        check_what_is_left(node_dir, shard, line)
    finally:
        shard.stop(retire=False, timeout_s=PATIENT_S)


class Fire:
    """Workers of every role, of which one after the other is killed and replaced."""

    def __init__(self, workers: Workers, node_dir: Path, rng: random.Random) -> None:
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
        if self._random.random() < 0.3:
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

    def _start(self, row: int) -> int:
        seed = self._random.getrandbits(32)
        return self._workers.start(ROLES[row], self._node_dir, row, seed)

    def _kill(self, row: int) -> None:
        self._stopped.pop(row, None)
        self._workers.kill(self._pids[row])
        self._pids[row] = self._start(row)

    def _stop(self, row: int) -> None:
        os.kill(self._pids[row], signal.SIGSTOP)
        self._stopped[row] = time.monotonic() + self._random.uniform(0, 0.3)

    def _wake(self, *, everybody: bool = False) -> None:
        now = time.monotonic()
        for row in [row for row, at in self._stopped.items() if everybody or at <= now]:
            del self._stopped[row]
            os.kill(self._pids[row], signal.SIGCONT)


def check_what_is_left(node_dir: Path, shard: Shard, line: Line) -> None:
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
        check_contents(arena.tables)
    for keys, _ in map(chain_of, range(NUM_CHAINS)):
        wait_for(lambda keys=keys: line.matched(keys) == num_here(arena, keys), "the announcements")
    shard.clear(PATIENT_S)
    assert not states.any(), "a slot is lost"
    assert arena.stats()["spare_slabs"] == arena.tables.geometry.num_slabs
    arena.close()


# -- what the processes do, each until it is killed or finds something wrong ----------------------


def prepare() -> None:
    """Make what every worker needs, once for all that are forked from this process."""
    for number in range(NUM_CHAINS):
        chain_of(number)


def run(args: list[str]) -> None:
    """Run a worker: its role, directory, row on the board, and seed."""
    role, directory, row, seed = args
    if role == "shard":
        be_shard(Path(directory), int(row))
    worker = Worker(Path(directory), int(row), int(seed))
    worker.work(share_of_writes={"read": 0.0, "write": 1.0, "both": 0.5}[role])


def be_shard(directory: Path, row: int) -> None:
    """Be a shard until killed; count while it serves."""
    logging.disable(logging.WARNING)  # it would name every holder that was killed
    steps = board(directory)[row]
    shard = Shard("fire", shard_settings(directory))
    shard.start()
    while (status := shard.status())["state"] != "failed":
        steps[STEPS] += status["state"] == "serving"
        time.sleep(0.01)
    raise AssertionError(status)


def insist(attempt: Callable[[], bool]) -> None:
    """Do what must succeed; until a shard has mended what a death tore, the arena says no."""
    deadline = time.monotonic() + 20
    while not attempt():
        assert time.monotonic() < deadline, "the arena stays busy"
        time.sleep(0.002)


class Worker:
    """A process that stores and loads chains."""

    def __init__(self, directory: Path, row: int, seed: int) -> None:
        self.arena = Arena(directory, lock_wait_s=0.002)  # as in production
        insist(lambda: self._has_joined(f"worker {row}"))
        self._counts = board(directory)[row]
        self._random = random.Random(seed)

    def work(self, *, share_of_writes: float) -> None:
        while True:
            number, length = self._random.randrange(NUM_CHAINS), self._random.randint(1, LENGTH)
            if self._random.random() < share_of_writes:
                self._save(number, length)
            else:
                self._load(number, length)
            self._counts[STEPS] += 1

    def _has_joined(self, label: str) -> bool:
        try:
            self.arena.join(label)
        except ShardUnavailable:
            return False
        return True

    def _save(self, number: int, length: int) -> None:
        """Store a chain whole or as a head and a tail; sometimes change one's mind."""
        keys, blocks = chain_of(number)
        cut = self._random.choice((0, length // 2))
        parent, size = keys[cut - 1] if cut else None, blocks.shape[1]
        made = self.arena.reserve(
            keys[cut:length], parent=parent, depth=cut, part=0, block_bytes=size
        )
        if made is None:
            return
        sums = self.arena.write(made, blocks, cut + made.rows)
        if self._random.random() < 0.1:
            insist(lambda: self.arena.abort(made))
        else:
            insist(lambda: self.arena.commit(made, sums))
            self._counts[WRITTEN] += len(sums)

    def _load(self, number: int, length: int) -> None:
        """Lease what there is of a chain, read it with verification, compare every byte."""
        keys, blocks = chain_of(number)
        leases = self.arena.lease(keys[:length])
        if not leases:
            return
        (held,) = leases
        pool = np.zeros((held.num_slots, blocks.shape[1]), dtype=np.uint8)
        if self._random.random() < 0.1:
            time.sleep(0.003)  # others get to evict, were it not leased
        self.arena.read(held, pool, np.arange(held.num_slots), verify=True)
        assert np.array_equal(pool, blocks[: held.num_slots]), "wrong bytes"
        insist(lambda: self.arena.release(held))
        self._counts[READ] += held.num_slots
