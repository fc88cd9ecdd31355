"""Several processes on one arena: deaths, stops and forks at chosen moments."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner
from kvray.store.arena import holders, lease, slabs
from kvray.store.arena.layout import FREE, LIMBO, RESERVED
from kvray.store.machine.side_file import SideFile
from tests.unit.store.child import Child, in_fork
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import chain, fetch, leased, served, spec, store
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


@pytest.mark.parametrize(
    ("column", "look"),
    [
        ("page_holder", lease.count_leases),
        ("slab_block_bytes", slabs.serving),
        ("holder_live", lambda tables: holders.dead_rows(tables, SimpleNamespace(is_locked=bool))),
    ],
)
@pytest.mark.parametrize("arena", [spec(num_slabs=2048)], indirect=True)
def test_a_look_without_the_lock_at_what_others_write_raises_not(arena, child, column, look):
    arena.leave()
    table, writer = getattr(arena.tables, column), child()
    writer.tell(f"any(arena.tables.{column}.fill(n) for _ in iter(int, 1) for n in (0, 1))")
    wait_for(table.any, "the first write")
    for _ in range(300):
        look(arena.tables)
    writer.kill()
    table[:] = 0
