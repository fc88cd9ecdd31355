"""One tier of a replay: real tables, slots and policy, and no bytes."""

from __future__ import annotations

import numpy as np

from kvray.store.arena import eviction, slots
from kvray.store.arena.layout import Geometry
from kvray.store.arena.tables import Array, Tables
from kvray.store.policy import Policy

BLOCK_BYTES = 4096
"""The nominal size of a block; nothing is ever stored in it."""
_RANKED_SHARE, _RANKED_MIN = 0.05, 96
"""Blocks that are ranked at a time, unless all are."""


class Tier:
    """A tier of some blocks; it tells its policy which blocks leave, not which come."""

    def __init__(self, num_blocks: int, policy: Policy, *, is_below: bool = False) -> None:
        """Start empty; `is_below`: blocks come from a tier above, not from requests."""
        capacity = num_blocks * BLOCK_BYTES
        geometry = Geometry(
            capacity=capacity, slab_bytes=capacity, slot_min=BLOCK_BYTES, holders_max=1
        )
        memory = bytearray(geometry.table_bytes)
        self.tables = Tables(memory, geometry, has_data=False, has_undo=False)
        self.policy = policy
        self._slots = np.arange(geometry.num_slots)
        step = max(_RANKED_MIN, int(_RANKED_SHARE * num_blocks))
        # Where new blocks go last, and the others keep their order, one ranking does for all.
        self._ranked = num_blocks if policy.keeps_order and not is_below else step

    def next_to_go(self, count: int, *, protect: Array, now: float) -> Array:
        """Return up to `count` slots to evict in order, or more if more are ranked at a time."""
        return eviction.choose_victims(
            self.tables,
            max(count, self._ranked),
            within=self._slots,
            protect=protect,
            rank=lambda some: self.policy.rank(some, now=now),
        )

    def evict(self, victims: Array) -> None:
        """Evict slots that `next_to_go` has returned."""
        slots.evict(self.tables, victims)
        self.policy.freed(victims)

    def reserve(self, keys: Array, *, parent: Array | None, depth: int) -> slots.Reservation:
        """Reserve slots for those of `keys` that are missing; there is room for them."""
        made = slots.reserve(
            self.tables,
            keys,
            parent=parent,
            depth=depth,
            part=0,
            block_bytes=BLOCK_BYTES,
            holder=0,
            candidates=slots.Candidates(),
        )
        assert made is not None, "a reservation may be short, but there is one"
        return made

    def commit(self, made: slots.Reservation) -> None:
        """Let the blocks of a reservation be found from now on."""
        slots.commit(self.tables, made, np.zeros(len(made.slots), dtype="<u8"))
