"""One tier of a replay: real tables, slots and policy, and no bytes."""

from __future__ import annotations

import numpy as np

from kvray.store import eviction, slots
from kvray.store.layout import Geometry
from kvray.store.policy import Policy
from kvray.store.tables import Array, Tables

BLOCK_BYTES = 4096
"""What a block is taken to have; nothing is ever stored in it."""

_PART = 0
_NO_CANDIDATES = slots.Candidates()
_RANKED_SHARE, _RANKED_MIN = 0.05, 96
"""Blocks that are ranked at a time, unless all are."""


class Tier:
    """A tier of some blocks; its policy is told of what leaves, not of what comes."""

    def __init__(self, num_blocks: int, policy: Policy, *, is_below: bool = False) -> None:
        """Start empty.

        Args:
            num_blocks: for which there is room.
            policy: ranks them.
            is_below: whether blocks come from a tier above, instead of just being used.
        """
        capacity = num_blocks * BLOCK_BYTES
        geometry = Geometry(
            capacity=capacity, slab_bytes=capacity, slot_min=BLOCK_BYTES, holders_max=1
        )
        memory = bytearray(geometry.table_bytes)
        self.tables = Tables(memory, geometry, has_data=False, has_undo=False)
        self.policy = policy
        self._slots = np.arange(geometry.num_slots)
        step = max(_RANKED_MIN, int(_RANKED_SHARE * num_blocks))
        # Where what comes goes last, and the others keep their order, one ranking does for all.
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
        """Have blocks leave that `next_to_go` has returned."""
        slots.evict(self.tables, victims)
        self.policy.freed(victims)

    def reserve(self, keys: Array, *, parent: Array | None, depth: int) -> slots.Reservation:
        """Reserve slots for what is missing of `keys`, for which room was made."""
        made = slots.reserve(
            self.tables,
            keys,
            parent=parent,
            depth=depth,
            part=_PART,
            block_bytes=BLOCK_BYTES,
            holder=0,
            candidates=_NO_CANDIDATES,
        )
        assert made is not None, "it makes do with what there is"
        return made

    def commit(self, made: slots.Reservation) -> None:
        """Have blocks found from now on for which slots were reserved."""
        slots.commit(self.tables, made, np.zeros(len(made.slots), dtype="<u8"))
