"""Deaths before any store of any call to an arena: others go on, and all comes back but the call.

The stores of a call are recorded. What a death leaves is the memory from before the call with the
first of them, and no liveness lock.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvray.store import Arena, ArenaOwner, Reservation
from kvray.store.arena.layout import FREE, READY
from kvray.store.arena.tables import Array
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.unit.store.invariants import check_contents, check_invariants
from tests.unit.store.small_arena import SLOT, chain, fetch, leased, pool_of, reserved, store
from tests.unit.store.write_log import Replay, WatchedTables, Write, copy_of, image

TRUNK, NEW = chain(10, seed="trunk"), chain(9, seed="new")
CROWD = [chain(9, seed=f"crowd {number}") for number in range(4)]

Call = Callable[[], object]


def reserve(dying: Arena, block_bytes: int = SLOT) -> Reservation:
    return reserved(dying, NEW, parent=TRUNK[-1], depth=10, block_bytes=block_bytes)


def written(dying: Arena) -> tuple[Reservation, Array]:
    made = reserve(dying)
    pool = pool_of([NEW[row] for row in made.rows])
    return made, dying.write(made, pool, np.arange(len(pool)))


def burdened(dying: Arena, call: Call) -> Call:
    """Return the call of a process that has a lease and a reservation."""
    assert dying.lease(TRUNK)
    written(dying)
    return call


def beside_a_dead_one(dying: Arena, call: Call) -> Call:
    """Return the call of a process beside one that has died with a lease and a reservation."""
    dead = Arena.attach(dying.directory, label="dead", lock_wait_s=1)
    burdened(dead, call)
    die(dead)
    dead.close()
    return call


def die(arena: Arena) -> None:
    """End the liveness lock, which is all that a death does beside its stores."""
    arena.side_file.unlock(HOLDER_BYTES + arena.holder)
    arena.stay()


def bad_slots(arena: Arena) -> Array:
    tables = arena.tables
    return np.flatnonzero((tables.slot_state == READY) & (tables.slot_leases == 0))


CALLS: dict[str, Callable[[Arena], Call]] = {
    "join": lambda dying: (dying.leave(), partial(dying.join, "dying"))[1],
    "lease": lambda dying: partial(dying.lease, TRUNK),
    "lease slots": lambda dying: partial(dying.lease_slots, np.arange(64)),
    "release": lambda dying: partial(dying.release, leased(dying, TRUNK)),
    "reserve": lambda dying: partial(reserve, dying),
    "reserve large": lambda dying: partial(reserve, dying, 4 * SLOT),
    "commit": lambda dying: partial(dying.commit, *written(dying)),
    "abort": lambda dying: partial(dying.abort, reserve(dying)),
    "leave": lambda dying: burdened(dying, dying.leave),
    "quarantine": lambda dying: partial(dying.quarantine, bad_slots(dying)),
    "bury": lambda dying: beside_a_dead_one(dying, partial(ArenaOwner(dying).bury_dead, limbo_s=0)),
    "evict": lambda dying: partial(ArenaOwner(dying).evict_ahead, 0.5),
    "clear": lambda dying: ArenaOwner(dying).clear,
    "adopt": lambda dying: burdened(dying, ArenaOwner(dying).adopt),
    "mend": lambda dying: burdened(dying, ArenaOwner(dying).mend),
}
"""Name -> prepares and returns a call."""


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_a_death_before_a_store_harms_nobody(arena: Arena, directory: Path, name, step):
    """It comes before the first store, before that `step` later, and so on."""
    for keys in CROWD:
        store(arena, keys)
    store(arena, chain(4, seed="large"), block_bytes=2 * SLOT)
    store(arena, TRUNK)
    held = leased(arena, TRUNK[:4])
    dying = Arena.attach(directory, label="dying", lock_wait_s=1)
    call = CALLS[name](dying)
    before, log = copy_of(dying.tables), list[Write]()
    dying.tables = WatchedTables(dying.tables.data.base, before.geometry, log.extend)
    call()
    if name != "leave":  # else it has given the lock up itself
        die(dying)
    replay = Replay(before, log)
    for died_at in itertools.chain(range(0, len(log), step), [len(log)]):
        memoryview(arena.tables.data.base)[:] = image(replay.after(died_at))
        if name in ("adopt", "mend"):  # only an owner mends what an owner left
            ArenaOwner(arena).adopt()
        leases = arena.lease(CROWD[0])
        assert leases is not None, "the arena cannot be had"
        assert not leases or fetch(arena, CROWD[0], leases[0])
        assert arena.release(*leases)
        check_after(arena)
        assert fetch(arena, TRUNK, held), "a lease of a living process was broken"
        assert int(arena.tables.slot_leases.sum()) == held.num_slots
    dying.close()


def check_after(arena: Arena) -> None:
    """Fail unless all that the dead held is back, and all that is READY is right."""
    tables = arena.tables
    for _ in range(2):
        ArenaOwner(arena).bury_dead(limbo_s=0)
    assert set(np.unique(tables.slot_state)) <= {FREE, READY}
    assert int(tables.holder_live.sum()) == 1
    assert not tables.undo.is_open
    check_invariants(tables)
    check_contents(tables)
