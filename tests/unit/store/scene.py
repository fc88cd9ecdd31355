"""A lived-in arena, and every operation that changes one."""

from collections.abc import Callable

import numpy as np

from kvray.store.arena import lease, slabs, slots
from kvray.store.arena.lease import Lease
from kvray.store.arena.tables import Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    commit,
    evict,
    find,
    make_tables,
    put,
    reserve,
    take,
)

NOW = 1000.0
DYING, LIVING = 1, 2
"""Holders: the one that dies inside of its operation, and one whose things must not be touched."""

TRUNK, LEFT, RIGHT = chain(6, seed="trunk"), chain(9, seed="left"), chain(5, seed="right")
LARGE, PENDING, THEIRS = chain(3, seed="large"), chain(4, seed="mine"), chain(3, seed="theirs")


class Scene:
    """A lived-in arena: forks, leases, two block sizes, writers at work, a block in quarantine."""

    def __init__(self, *, crowded: bool) -> None:
        tables = self.tables = make_tables(num_slabs=6)
        put(tables, TRUNK)
        put(tables, LEFT, parent=TRUNK[-1], depth=6)
        put(tables, RIGHT, parent=TRUNK[2], depth=3)
        put(tables, LARGE, block_bytes=2 * SLOT)
        self.pending = reserve(tables, PENDING, parent=RIGHT[-1], depth=8, holder=DYING)
        self.theirs = reserve(tables, THEIRS, parent=TRUNK[0], depth=1, holder=LIVING)
        self.mine = take(tables, TRUNK + LEFT[:2], holder=DYING)
        self.held = take(tables, TRUNK[:3] + RIGHT[:2], holder=LIVING)
        slots.quarantine(tables, np.array(find(tables, RIGHT[:1])))
        reserve(tables, chain(2, seed="dead"), holder=5)
        slots.strand(tables, 5, now=NOW - 1)
        slots.quarantine(tables, np.array(find(tables, LEFT[8:])))
        if crowded:
            put(tables, chain(slabs.num_available(tables, SLOT), seed="filler"))
            assert not slabs.num_available(tables, SLOT)
        tables.undo.settle()
        check_invariants(tables)


def leave(tables: Tables, holder: int) -> None:
    slots.abort_holder(tables, holder)
    lease.release_holder(tables, holder)


def slots_named(tables: Tables, held: Lease) -> list[int]:
    found = lease.leased_slots(tables, held)
    assert found is not None, "a lease was broken"
    return list(found.tolist())


Operation = Callable[[Tables, Scene], object]

OPERATIONS: dict[str, Operation] = {
    "reserve": lambda tables, scene: reserve(tables, chain(9, seed="new"), holder=DYING),
    "reserve below": lambda tables, scene: reserve(
        tables, chain(5, seed="new"), parent=TRUNK[-1], depth=6, holder=DYING
    ),
    "reserve what parentless blocks need": lambda tables, scene: reserve(
        tables, TRUNK[:3] + RIGHT, holder=DYING
    ),
    "reserve another size": lambda tables, scene: reserve(
        tables, chain(7, seed="new"), block_bytes=4 * SLOT, holder=DYING
    ),
    "commit": lambda tables, scene: commit(tables, scene.pending),
    "abort": lambda tables, scene: slots.abort(tables, scene.pending),
    "leave": lambda tables, scene: leave(tables, DYING),
    "evict": lambda tables, scene: evict(tables, 9),
    "lease": lambda tables, scene: take(tables, TRUNK + LEFT[:4], holder=DYING),
    "release": lambda tables, scene: lease.release(tables, scene.mine),
    "quarantine": lambda tables, scene: slots.quarantine(
        tables, np.array(find(tables, TRUNK[2:4] + LEFT[1:2]))
    ),
    "bury": lambda tables, scene: (
        lease.release_holder(tables, DYING),
        slots.strand(tables, DYING, now=NOW),
    ),
    "reclaim": lambda tables, scene: slots.reclaim(tables, before=NOW),
}
