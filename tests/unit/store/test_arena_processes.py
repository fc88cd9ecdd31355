"""Several processes on one arena: deaths, stops and forks, each by itself."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner
from kvray.store.arena.layout import FREE, LIMBO, RESERVED
from tests.unit.store.conftest import Child
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import chain, fetch, store

KEYS = chain(10)
LEASE = "arena.lease(small.chain(10))"
RESERVE = "arena.reserve(small.chain(3, seed='x'), parent=None, depth=0, part=0, block_bytes=4096)"


@pytest.fixture
def other(arena: Arena, child: Callable[[], Child]) -> Child:
    """A second process that is a holder of the arena."""
    started = child()
    assert started.say("arena.join('other')") == "1"
    return started


def test_what_one_process_stores_another_reads(arena: Arena, other: Child) -> None:
    other.say("small.store(arena, small.chain(10))")
    leases = arena.lease(KEYS)
    assert leases
    assert fetch(arena, KEYS, leases[0])


def test_killed_holder_loses_leases_at_once_and_slots_after_limbo(
    arena: Arena, other: Child
) -> None:
    store(arena, KEYS)
    other.say(LEASE)
    other.say(RESERVE)
    reserved = np.flatnonzero(arena.tables.slot_state == RESERVED)
    assert (len(reserved), int(arena.tables.slot_leases.sum())) == (3, 10)
    other.kill()
    assert ArenaOwner(arena).bury_dead(limbo_s=1000) == ["other"]
    assert not arena.tables.slot_leases.any()
    assert set(arena.tables.slot_state[reserved].tolist()) == {LIMBO}
    ArenaOwner(arena).bury_dead(limbo_s=0)
    assert set(arena.tables.slot_state[reserved].tolist()) == {FREE}
    check_invariants(arena.tables)


def test_stopped_holder_keeps_what_it_has(arena: Arena, other: Child) -> None:
    store(arena, KEYS)
    other.say(LEASE)
    other.say(RESERVE)
    other.process.send_signal(signal.SIGSTOP)
    assert ArenaOwner(arena).bury_dead(limbo_s=0) == []
    for number in range(10):
        store(arena, chain(40, seed=str(number)))
    assert arena.match(KEYS) == 10
    assert int((arena.tables.slot_state == RESERVED).sum()) == 3
    other.process.send_signal(signal.SIGCONT)
    assert other.say("arena.leave()") == "True"
    check_invariants(arena.tables)


def test_lock_that_another_process_keeps_is_a_miss_in_time(
    arena: Arena, other: Child, directory: Path
) -> None:
    store(arena, KEYS)
    hurried = Arena(directory, lock_wait_s=0.002)
    hurried.join("hurried")
    assert other.say("arena._lock.acquire(0)") == "True"
    other.process.send_signal(signal.SIGSTOP)
    waits = []
    for _ in range(20):
        start = time.monotonic()
        assert hurried.lease(KEYS) is None
        waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.002 + 0.005
    other.kill()
    leases = hurried.lease(KEYS)
    assert leases
    assert fetch(hurried, KEYS, leases[0])
    hurried.close()


def test_death_inside_a_section_is_repaired_by_the_next_taker(arena: Arena, other: Child) -> None:
    store(arena, KEYS)
    other.say(LEASE)
    other.say("arena._lock.acquire(0)")
    other.say("arena.tables.put(small.np.arange(256), index_slot=7)")
    other.kill()
    assert arena.match(KEYS) == 10
    assert arena.stats()["repairs"] == 1
    ArenaOwner(arena).bury_dead(limbo_s=0)
    check_invariants(arena.tables)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_can_do_nothing_and_breaks_nothing(arena: Arena, other: Child) -> None:
    store(arena, KEYS)
    leases = arena.lease(KEYS)
    assert leases
    pid = os.fork()
    if pid == 0:
        start = time.monotonic()
        fine = arena.lease(KEYS) is None and arena.match(KEYS) is None
        arena.close()
        os._exit(0 if fine and time.monotonic() - start < 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert other.say("ArenaOwner(arena).bury_dead(limbo_s=0)") == "[]"
    assert fetch(arena, KEYS, leases[0])
    check_invariants(arena.tables)
