"""Several processes on one arena: deaths, stops and forks, at chosen moments and at random ones.

Whatever is killed when: no reader ever sees a wrong byte, what is READY afterwards is right to the
byte, what the dead held comes back, nobody waits for ever, and the next shard takes over.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard, sweep
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import holders, lease, slabs
from kvray.store.arena.layout import FREE, LIMBO, READY, RESERVED
from kvray.store.machine.side_file import SideFile
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.store.child import Child, in_fork
from tests.unit.store.fork_server import Workers
from tests.unit.store.invariants import check_contents, check_invariants
from tests.unit.store.small_arena import (
    PATIENT_S,
    chain,
    fetch,
    leased,
    make_arena,
    num_here,
    served,
    spec,
    store,
)
from tests.unit.store.stress_worker import (
    NUM_CHAINS,
    STEPS,
    board,
    keys_of,
    shard_settings,
)
from tests.waiting import wait_for

KEYS = chain(10)
LEASE = "arena.lease(small.chain(10))"
RESERVE = "arena.reserve(small.chain(3, seed='x'), parent=None, depth=0, part=0, block_bytes=4096)"


@pytest.fixture
def other(arena: Arena, child: Callable[[], Child]) -> Child:
    """A second process that is a holder of the arena."""
    started = child()
    assert started.say("arena.join('other')") == "1"
    return started


def test_who_asks_for_others_leases_looks_at_no_other_process(arena, other, monkeypatch):
    store(arena, KEYS)
    other.say(LEASE)
    monkeypatch.delattr(SideFile, "lockers")  # it takes a second, and the lock is held
    assert not arena.leave(unless_leased=True)


def test_a_killed_holder_loses_leases_now_and_slots_after_limbo(arena, other):
    store(arena, KEYS)
    other.say(LEASE)
    other.say(RESERVE)
    owner, state = ArenaOwner(arena), arena.tables.slot_state
    reserved = np.flatnonzero(state == RESERVED)
    assert (len(reserved), int(arena.tables.slot_leases.sum())) == (3, 10)
    assert owner.bury_dead(limbo_s=1000) == []
    other.kill()
    for dead in (["other"], []):
        assert owner.bury_dead(limbo_s=1000) == dead
        assert not arena.tables.slot_leases.any()
        assert set(state[reserved].tolist()) == {LIMBO}
        check_invariants(arena.tables)
    owner.bury_dead(limbo_s=0)
    assert set(state[reserved].tolist()) == {FREE}


def test_a_lock_that_is_kept_is_a_miss_in_time_and_a_death_in_it_is_repaired(
    arena, other, directory
):
    store(arena, KEYS)
    hurried = Arena.attach(directory, label="hurried", lock_wait_s=0.002)
    assert other.say("small.acquire(arena._lock, 0)") == "True"
    other.say("arena.tables.put(small.np.arange(256), index_slot=7)")
    other.stop()
    waits = []
    for _ in range(20):
        start = time.monotonic()
        assert hurried.lease(KEYS) is None
        waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.002 + 0.005
    other.kill()
    assert served(hurried, KEYS) == 10
    assert arena.stats()["repairs"] == 1
    hurried.close()
    ArenaOwner(arena).bury_dead(limbo_s=0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_can_do_nothing_and_breaks_nothing(arena, other):
    store(arena, KEYS)
    held = leased(arena, KEYS)
    assert in_fork(lambda: (arena.lease(KEYS), arena.close()) == (None, None))
    assert other.say("ArenaOwner(arena).bury_dead(limbo_s=0)") == "[]"
    assert fetch(arena, KEYS, held)
    check_invariants(arena.tables)


@pytest.mark.parametrize(
    ("column", "look"),
    [
        ("page_holder", lease.count_leases),
        ("slab_block_bytes", slabs.serving),
        ("holder_live", lambda tables: holders.dead_rows(tables, SimpleNamespace(is_locked=bool))),
    ],
)
def test_a_look_without_the_lock_at_what_others_write_raises_not(directory, child, column, look):
    with closing(make_arena(directory, asked=spec(num_slabs=2048))) as arena:
        table, writer = getattr(arena.tables, column), child()
        writer.tell(f"any(arena.tables.{column}.fill(n) for _ in iter(int, 1) for n in (0, 1))")
        wait_for(table.any, "the first write")
        for _ in range(300):
            look(arena.tables)
        writer.kill()
        table[:] = 0


# -- at random moments ----------------------------------------------------------------------------

ROLES = ("shard", "read", "read", "write", "write", "both", "both")
"""Of the workers, by their rows on the board."""

STOPPED_SHARE, STOPPED_MAX_S = 0.3, 0.3


@pytest.fixture
def node_dir(directory: Path) -> Iterator[Path]:
    yield directory / "kvray-test"
    sweep(directory / "kvray-test")


@pytest.mark.parametrize(("kills", "seed"), [(40, 1), pytest.param(520, 2, marks=pytest.mark.long)])
def test_kills_at_any_moment_lose_and_spoil_nothing(node_dir, kills, seed):
    with Workers("stress_worker") as workers:
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

    def _start(self, row: int) -> int:
        seed = self._random.getrandbits(32)
        return self._workers.start(ROLES[row], self._node_dir, row, seed)

    def _kill(self, row: int) -> None:
        self._stopped.pop(row, None)
        self._workers.kill(self._pids[row])
        self._pids[row] = self._start(row)

    def _stop(self, row: int) -> None:
        os.kill(self._pids[row], signal.SIGSTOP)
        self._stopped[row] = time.monotonic() + self._random.uniform(0, STOPPED_MAX_S)

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
    for keys in map(keys_of, range(NUM_CHAINS)):
        wait_for(lambda keys=keys: line.matched(keys) == num_here(arena, keys), "the announcements")
    shard.clear(PATIENT_S)
    assert not states.any(), "a slot is lost"
    assert arena.stats()["spare_slabs"] == arena.tables.geometry.num_slabs
    arena.close()
