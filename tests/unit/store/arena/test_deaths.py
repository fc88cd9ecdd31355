"""Deaths before any store of any call to an arena: others go on, and all comes back but the call.

The stores of a call are recorded. What a death leaves is the memory from before the call with the
first of them, and no liveness lock. Whoever comes next finds all of a step there, or nothing.
"""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import slabs
from kvray.store.arena.layout import FREE, QUARANTINED, READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.unit.store.invariants import check_contents, check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    find,
    leased,
    pool_of,
    reserved,
    served,
    spec,
    store,
)
from tests.unit.store.write_log import Replay, WatchedTables, Write, copy_of, image, record

TRUNK, LEFT, RIGHT = chain(6, seed="trunk"), chain(9, seed="left"), chain(5, seed="right")
LARGE, PENDING, THEIRS = chain(3, seed="large"), chain(4, seed="mine"), chain(3, seed="theirs")
NEW, LATER = chain(9, seed="new"), chain(12, seed="afterwards")
OWNERS_PART = ("adopt", "mend")
"""Calls of which only an owner mends what a death has left."""


def die(arena: Arena) -> None:
    """End the liveness lock, which is all that a death does beside its stores."""
    arena.side_file.unlock(HOLDER_BYTES + arena.holder)
    arena.stay()


class Scene:
    """A lived-in arena: forks, leases, two block sizes, writers at work, a block in quarantine."""

    def __init__(self, arena: Arena, *, crowded: bool) -> None:
        self.arena = arena
        store(arena, TRUNK)
        store(arena, LEFT, parent=TRUNK[-1], depth=6)
        store(arena, RIGHT, parent=TRUNK[2], depth=3)
        store(arena, LARGE, block_bytes=2 * SLOT)
        dying = self.dying = Arena.attach(arena.directory, label="dying", lock_wait_s=1)
        self.pending = reserved(dying, PENDING, parent=RIGHT[-1], depth=8)
        self.sums = dying.write(self.pending, pool_of(PENDING), np.arange(4))
        self.mine = leased(dying, TRUNK + LEFT[:2])
        self.theirs = reserved(arena, THEIRS, parent=TRUNK[0], depth=1)
        self.their_sums = arena.write(self.theirs, pool_of(THEIRS), np.arange(3))
        self.held = leased(arena, TRUNK[:3] + RIGHT[:2])
        self.slots_held = arena.leased_slots(self.held).tolist()
        arena.quarantine(self.slots_of(RIGHT[:1]))
        self.let_one_die("buried")
        ArenaOwner(arena).bury_dead(limbo_s=1000)
        arena.quarantine(self.slots_of(LEFT[8:]))
        if crowded:
            store(arena, chain(slabs.num_available(arena.tables, SLOT), seed="filler"))
            assert not slabs.num_available(arena.tables, SLOT)

    def let_one_die(self, label: str) -> None:
        """Let a process die that has a lease and a reservation."""
        dead = Arena.attach(self.arena.directory, label=label, lock_wait_s=1)
        assert dead.lease(TRUNK)
        reserved(dead, chain(2, seed=label))
        die(dead)
        dead.close()

    def slots_of(self, keys: list[BlockKey]) -> Array:
        return np.array(find(self.arena.tables, keys))

    def check_after(self, name: str, before: Tables, left: Tables, done: Tables) -> None:
        """Fail if anything is wrong or lost after a death that has `left` these tables.

        `done` is what the call would have left: no block is lost, and no parent link, that it would
        not have touched.
        """
        arena, tables = self.arena, self.arena.tables
        memoryview(tables.data.base)[:] = image(left)
        if name in OWNERS_PART:
            ArenaOwner(arena).adopt()
        assert served(arena, LARGE, block_bytes=2 * SLOT) in (0, len(LARGE)), "others go on"
        for _ in range(2):
            ArenaOwner(arena).bury_dead(limbo_s=0)
        same = (before.slot_state == READY) & (done.slot_state == READY)
        same &= (before.slot_key == done.slot_key).all(axis=1)
        assert (tables.slot_state[same] == READY).all()
        assert (tables.slot_key[same] == before.slot_key[same]).all()
        linked = same & (before.slot_parent == done.slot_parent)
        assert (tables.slot_parent[linked] == before.slot_parent[linked]).all()
        assert arena.leased_slots(self.held).tolist() == self.slots_held
        assert int(tables.slot_leases.sum()) == len(self.slots_held)
        assert int(tables.holder_live.sum()) == 1
        assert arena.commit(self.theirs, self.their_sums)
        assert served(arena, THEIRS) == len(THEIRS)
        assert set(np.unique(tables.slot_state)) <= {FREE, READY, QUARANTINED}, "a slot is lost"
        store(arena, LATER)
        assert served(arena, LATER) == len(LATER)
        check_invariants(tables)
        check_contents(tables)


Call = Callable[[], object]

CALLS: dict[str, Callable[[Scene, Arena], Call]] = {
    "join": lambda scene, dying: (dying.leave(), partial(dying.join, "dying"))[1],
    "lease": lambda scene, dying: partial(dying.lease, TRUNK + LEFT[:4]),
    "lease slots": lambda scene, dying: partial(dying.lease_slots, np.arange(48)),
    "release": lambda scene, dying: partial(dying.release, scene.mine),
    "reserve": lambda scene, dying: partial(reserved, dying, NEW),
    "reserve below": lambda scene, dying: partial(reserved, dying, NEW, parent=TRUNK[-1], depth=6),
    "reserve lost parents": lambda scene, dying: partial(reserved, dying, TRUNK[:3] + RIGHT),
    "reserve larger": lambda scene, dying: partial(reserved, dying, NEW, block_bytes=4 * SLOT),
    "commit": lambda scene, dying: partial(dying.commit, scene.pending, scene.sums),
    "abort": lambda scene, dying: partial(dying.abort, scene.pending),
    "leave": lambda scene, dying: dying.leave,
    "quarantine": lambda scene, dying: partial(
        dying.quarantine, scene.slots_of(TRUNK[2:4] + LEFT[1:2])
    ),
    "bury": lambda scene, dying: (
        scene.let_one_die("dead"),
        partial(ArenaOwner(dying).bury_dead, limbo_s=0),
    )[1],
    "evict": lambda scene, dying: partial(ArenaOwner(dying).evict_ahead, 0.5),
    "clear": lambda scene, dying: ArenaOwner(dying).clear,
    "adopt": lambda scene, dying: ArenaOwner(dying).adopt,
    "mend": lambda scene, dying: ArenaOwner(dying).mend,
}
"""Name -> prepares and returns a call."""


def columns_equal(one: Tables, other: Tables) -> bool:
    """Whether all that is undone is equal, but for what a FREE slot or an empty entry says."""
    is_said = {"slot_parent": one.slot_state > 0, "index_tag": one.index_slot.ravel() > 0}
    return all(
        np.array_equal(column[is_said.get(name, ...)], other.columns[name][is_said.get(name, ...)])
        for name, column in one.columns.items()
    )


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arena", [spec(num_slabs=6)], indirect=True)
def test_a_death_before_a_store_harms_nobody(arena, name, crowded, step):
    """It comes before the first store, before that `step` later, and so on; again in the undo."""
    scene, chance = Scene(arena, crowded=crowded), random.Random(name)
    dying, call = scene.dying, CALLS[name](scene, scene.dying)
    before, log = copy_of(dying.tables), list[Write]()
    dying.tables = WatchedTables(dying.tables.data.base, before.geometry, log.extend)
    call()
    done, replay, settled = copy_of(arena.tables), Replay(before, log), before
    if name != "leave":  # else it has given the lock up itself
        die(dying)
    for died_at in range(len(log) + 1):
        left = replay.after(died_at)
        if died_at % step == 0 or died_at == len(log):
            scene.check_after(name, before, left, done)
            undoing = record(left, lambda tables: tables.undo.roll_back())
            twice = Replay(left, undoing).after(chance.randint(0, len(undoing)))
            scene.check_after(name, before, twice, done)
        if not left.undo.is_open:
            settled = left
        elif left.undo.roll_back() or name not in OWNERS_PART:
            assert columns_equal(left, settled), "it is not as before its last step"
    assert image(left) == image(done) or name in OWNERS_PART, "the log of stores is not complete"
    dying.close()
