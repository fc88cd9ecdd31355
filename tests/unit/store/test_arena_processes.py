"""Several processes on one arena: deaths, stops and forks, at chosen moments and at random ones.

Whatever is killed when: no reader ever sees a wrong byte, what is READY afterwards is right to the
byte, what the dead held comes back, nobody waits for ever, and the next shard takes over.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard, sweep
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import holders, lease, slabs
from kvray.store.arena.layout import FREE, LIMBO, READY, RESERVED
from kvray.store.machine.side_file import SideFile
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.store.child import Child, in_fork
from tests.unit.store.dying import OPERATIONS, TRUNK
from tests.unit.store.fork_server import Workers
from tests.unit.store.invariants import check_bytes, check_contents, check_invariants
from tests.unit.store.small_arena import (
    PATIENT_S,
    SLOT,
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
    LOCK_WAIT_S,
    NUM_CHAINS,
    READ,
    SLACK_S,
    STEPS,
    WRITTEN,
    arena_spec,
    board,
    core_wait_s,
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


def test_stopped_holder_keeps_what_it_has(arena, other):
    store(arena, KEYS)
    other.say(LEASE)
    other.say(RESERVE)
    other.stop()
    assert ArenaOwner(arena).bury_dead(limbo_s=0) == []
    for number in range(10):
        store(arena, chain(40, seed=str(number)))
    assert num_here(arena, KEYS) == 10
    assert int((arena.tables.slot_state == RESERVED).sum()) == 3
    other.go_on()
    assert other.say("arena.leave()") == "True"


def test_a_lock_that_is_kept_is_a_miss_in_time(arena, other, directory):
    store(arena, KEYS)
    hurried = Arena.attach(directory, label="hurried", lock_wait_s=0.002)
    assert other.say("small.acquire(arena._lock, 0)") == "True"
    other.stop()
    waits = []
    for _ in range(20):
        start = time.monotonic()
        assert hurried.lease(KEYS) is None
        waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.002 + 0.005
    other.kill()
    assert served(hurried, KEYS) == 10
    hurried.close()


def test_death_inside_a_section_is_repaired_by_the_next_taker(arena, other):
    store(arena, KEYS)
    other.say(LEASE)
    other.say("small.acquire(arena._lock, 0)")
    other.say("arena.tables.put(small.np.arange(256), index_slot=7)")
    other.kill()
    assert served(arena, KEYS) == 10
    assert arena.stats()["repairs"] == 1
    ArenaOwner(arena).bury_dead(limbo_s=0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_can_do_nothing_and_breaks_nothing(arena, other):
    store(arena, KEYS)
    held = leased(arena, KEYS)
    assert in_fork(lambda: (arena.lease(KEYS), arena.close()) == (None, None))
    assert other.say("ArenaOwner(arena).bury_dead(limbo_s=0)") == "[]"
    assert fetch(arena, KEYS, held)
    check_invariants(arena.tables)


NUM_PROCESSES = 8


@pytest.mark.parametrize("seconds", [2.5, pytest.param(30.0, marks=pytest.mark.long)])
def test_eight_processes_read_right_and_lease_in_time(directory, seconds):
    node_dir = directory / "kvray-test"
    node_dir.mkdir()
    arena = make_arena(node_dir, asked=arena_spec())
    arena.join("test")
    counts = board(node_dir)
    with Workers("stress_worker") as workers:
        pids = [workers.start("contend", node_dir, n, n, seconds) for n in range(NUM_PROCESSES)]
        assert [workers.wait(pid) for pid in pids] == [0] * NUM_PROCESSES, "see the traceback above"
    figures = arena.stats()
    assert (figures["corrupt"], figures["leased_blocks"], figures["holders"]) == (0, 0, 1)
    check_invariants(arena.tables)
    check_bytes(arena.tables)
    print(f"{counts[:, READ].sum()} blocks read, {counts[:, WRITTEN].sum()} written")
    assert (counts[:NUM_PROCESSES, [READ, WRITTEN]] > 0).all()
    assert arena.stats()["evicted"] > 0
    arena.close()


# -- before every store ---------------------------------------------------------------------------

CROWD = [chain(9, seed=f"crowd {number}") for number in range(4)]


class Survivor:
    """A process that uses the arena all the time, and has a lease that nobody may break."""

    def __init__(self, directory: Path) -> None:
        make_arena(directory).close()
        self.arena = Arena(directory, lock_wait_s=LOCK_WAIT_S)
        self.arena.join("survivor")
        self.waited_s = 0.0
        self.restore()
        self.held = leased(self.arena, TRUNK[:4])

    def restore(self) -> None:
        """Bring back what an operation may have evicted: a full arena of two block sizes."""
        for keys in CROWD:
            store(self.arena, keys)
        store(self.arena, chain(4, seed="large"), block_bytes=2 * SLOT)
        store(self.arena, TRUNK)

    def call(self) -> bool:
        """Lease and release, timed; return whether the arena could be had."""
        start, without_core = time.monotonic(), core_wait_s()
        leases = self.arena.lease(CROWD[0])
        waited_s = time.monotonic() - start - (core_wait_s() - without_core)
        self.waited_s = max(self.waited_s, waited_s)
        if leases is None:
            return False
        assert not leases or fetch(self.arena, CROWD[0], leases[0])
        while not self.arena.release(*leases):
            time.sleep(0.001)
        return True

    def check(self) -> None:
        """Fail unless all that others held is back, and all that is READY is right."""
        arena, tables = self.arena, self.arena.tables
        ArenaOwner(arena).bury_dead(limbo_s=0)
        ArenaOwner(arena).bury_dead(limbo_s=0)
        assert fetch(arena, TRUNK, self.held), "a lease of a living process was broken"
        assert int(tables.slot_leases.sum()) == self.held.num_slots
        assert set(np.unique(tables.slot_state)) <= {FREE, READY}
        assert int(tables.holder_live.sum()) == 1
        assert not tables.undo.is_open
        check_invariants(tables)
        check_bytes(tables)
        check_contents(tables)


@pytest.fixture
def survivor(directory: Path) -> Iterator[Survivor]:
    made = Survivor(directory)
    with closing(made.arena):
        yield made


@pytest.fixture(scope="module")
def dying() -> Iterator[Workers]:
    """Starts processes that die or stop before a store."""
    with Workers("dying") as server:
        yield server


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_death_or_stop_before_a_store_harms_nobody(dying, survivor, directory, name, sent, step):
    """It gets the signal before its first store, before that `step` later, and so on."""
    for count in itertools.count():
        pid = dying.start(directory, name, 1 + count * step, sent)
        status = dying.wait_or_stop(pid)
        if status == -signal.SIGSTOP:
            survivor.call()
            os.kill(pid, signal.SIGCONT)
            assert dying.wait(pid) == 0
        else:
            assert status in (0, -signal.SIGKILL)
            if name in ("adopt", "mend"):  # only an owner mends what an owner left
                ArenaOwner(survivor.arena).adopt()
            assert survivor.call(), "the lock is held by nobody who lives"
        survivor.check()
        if status == 0:
            break
        survivor.restore()
    assert count >= (2 if step == 1 else 1)
    assert survivor.waited_s < LOCK_WAIT_S + SLACK_S


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
        with closing(Arena(self._node_dir, lock_wait_s=PATIENT_S)) as arena:
            return int(arena.stats()["shard_epoch"])

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
    shard = line.follow(Shard("after", shard_settings(node_dir)))
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
        check_contents(arena.tables)
    for keys in map(keys_of, range(NUM_CHAINS)):
        wait_for(lambda keys=keys: line.matched(keys) == num_here(arena, keys), "the announcements")
    shard.clear(PATIENT_S)
    assert not states.any(), "a slot is lost"
    assert arena.stats()["spare_slabs"] == arena.tables.geometry.num_slabs
    arena.close()
    return figures
