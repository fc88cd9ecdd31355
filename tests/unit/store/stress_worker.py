"""What the processes of the stress tests do, each until it is killed or finds something wrong.

Every worker has a row on a board in shared memory, where it counts what it did; a worker that is
started in the place of a dead one goes on with its row.
"""

import logging
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import ArenaConfig, ShardConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.tables import Array
from tests.unit.store.small_arena import SLOT, chain, pool_of

BLOCK_BYTES = (SLOT, SLOT, 3 * SLOT, 8 * SLOT)
"""Of the chains, in turn."""

NUM_CHAINS = 12
LENGTH = 256
CAPACITY = 12 * 2**20
"""Of the arena: a quarter of what the chains have, so that it is always full."""

LOCK_WAIT_S = 0.002
"""As in production."""

STEPS, READ, WRITTEN = range(3)
"""Columns of the board: operations done, blocks read and compared, blocks committed."""

_PATIENT_S = 20.0


def shard_settings(directory: Path) -> ShardSettings:
    """Return the settings of a shard that buries within milliseconds."""
    return ShardSettings(
        directory=directory,
        spec=ArenaSpec(
            cluster_name="test", capacity=CAPACITY, slab=256 * 2**10, slot_min=SLOT, holders_max=32
        ),
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
def keys_of(number: int) -> list[BlockKey]:
    return chain(LENGTH, seed=f"stress {number}")


@cache
def blocks_of(number: int) -> Array:
    """Return the only right content of a chain, one row a key."""
    return pool_of(keys_of(number), block_bytes=block_bytes_of(number))


def block_bytes_of(number: int) -> int:
    return BLOCK_BYTES[number % len(BLOCK_BYTES)]


def prepare() -> None:
    """Make what every worker needs, once for all that are forked from this process."""
    for number in range(NUM_CHAINS):
        blocks_of(number)


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
    deadline = time.monotonic() + _PATIENT_S
    while not attempt():
        assert time.monotonic() < deadline, "the arena stays busy"
        time.sleep(0.002)


class Worker:
    """A process that stores and loads chains."""

    def __init__(self, directory: Path, row: int, seed: int) -> None:
        self.arena = Arena(directory, lock_wait_s=LOCK_WAIT_S)
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
        keys, blocks, size = keys_of(number), blocks_of(number), block_bytes_of(number)
        cut = self._random.choice((0, length // 2))
        parent = keys[cut - 1] if cut else None
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
        leases = self.arena.lease(keys_of(number)[:length])
        if not leases:
            return
        (held,) = leases
        pool = np.zeros((held.num_slots, block_bytes_of(number)), dtype=np.uint8)
        if self._random.random() < 0.1:
            time.sleep(0.003)  # others get to evict, were it not leased
        self.arena.read(held, pool, np.arange(held.num_slots), verify=True)
        assert np.array_equal(pool, blocks_of(number)[: held.num_slots]), "wrong bytes"
        insist(lambda: self.arena.release(held))
        self._counts[READ] += held.num_slots
