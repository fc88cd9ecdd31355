"""For every n: a process that dies, or stops, before its n-th store into an arena harms nobody."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner, Lease
from kvray.store.arena.layout import FREE, READY
from tests.unit.store.dying import OPERATIONS, TRUNK, Dying
from tests.unit.store.invariants import check_bytes, check_contents, check_invariants
from tests.unit.store.small_arena import SLOT, chain, fetch, make_arena, spec, store

LOCK_WAIT_S = 0.002
SLACK_S = 0.2
"""For the timer and the call's own work, on a busy machine; who waits for the dead waits longer."""

CROWD = [chain(9, seed=f"crowd {number}") for number in range(4)]


class Survivor:
    """A process that uses the arena all the time, and has a lease that nobody may break."""

    def __init__(self, directory: Path) -> None:
        make_arena(directory, asked=spec(num_slabs=8, slots_per_slab=8)).close()
        self.arena = Arena(directory, lock_wait_s=LOCK_WAIT_S)
        self.arena.join("survivor")
        self.held: Lease | None = None
        self.waited_s = 0.0
        self.restore()

    def restore(self) -> None:
        """Bring back what an operation may have evicted: a full arena of two block sizes."""
        for keys in CROWD:
            store(self.arena, keys)
        store(self.arena, chain(4, seed="large"), block_bytes=2 * SLOT)
        store(self.arena, TRUNK)
        if self.held is None:
            leases = self.arena.lease(TRUNK[:4])
            assert leases
            self.held = leases[0]

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
        assert self.held is not None
        assert fetch(arena, TRUNK, self.held), "a lease of a living process was broken"
        assert int(tables.slot_leases.sum()) == self.held.num_slots
        assert set(np.unique(tables.slot_state)) <= {FREE, READY}
        assert int(tables.holder_live.sum()) == 1
        assert not tables.undo.is_open
        check_invariants(tables)
        check_bytes(tables)
        check_contents(tables)


def core_wait_s() -> float:
    """Return how long this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.fixture
def survivor(directory: Path) -> Iterator[Survivor]:
    made = Survivor(directory)
    yield made
    made.arena.close()


def live(survivor: Survivor, directory: Path, name: str, sent: str, step: int) -> int:
    """Have `name` get a signal before its first store, before that `step` later, and so on.

    Returns:
        How many times it got one before it finished without.
    """
    with Dying(directory) as dying:
        for count in itertools.count():
            answer = dying.say(name, 1 + count * step, sent)
            if answer[0] == "stopped":
                survivor.call()
                answer = [*dying.say("continue", answer[1]), "stopped"]
                assert answer[0] == "finished"
            else:
                assert answer[0] in ("killed", "finished")
                if name in ("adopt", "mend"):  # only an owner mends what an owner left
                    ArenaOwner(survivor.arena).adopt()
                assert survivor.call(), "the lock is held by nobody who lives"
            survivor.check()
            if answer == ["finished"]:
                return count
            survivor.restore()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_death_or_stop_before_some_stores_harms_nobody(
    survivor: Survivor, directory: Path, name: str, sent: str
) -> None:
    assert live(survivor, directory, name, sent, 61) > 0
    assert survivor.waited_s < LOCK_WAIT_S + SLACK_S


@pytest.mark.long
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_death_or_stop_before_any_store_harms_nobody(
    survivor: Survivor, directory: Path, name: str, sent: str
) -> None:
    assert live(survivor, directory, name, sent, 1) > 1
    assert survivor.waited_s < LOCK_WAIT_S + SLACK_S
