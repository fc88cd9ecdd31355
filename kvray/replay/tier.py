"""One tier of a replay: real tables, slots and policy, and no bytes."""

from __future__ import annotations

import numpy as np

from kvray.store import key_index, lease, slots
from kvray.store.layout import Geometry
from kvray.store.policy import Policy
from kvray.store.policy.victims import Victims
from kvray.store.tables import Array, Tables

BLOCK_BYTES = 4096
"""What a block is taken to have; nothing is ever stored in it."""

_PART = 0
_WANTED = lease.Wanted(_PART)
_NO_CANDIDATES = slots.Candidates()
_RANKED_SHARE, _RANKED_MIN = 0.05, 96
"""Blocks that are ranked at a time."""
_STEP_SHARE, _STEP_MIN = 0.01, 16
"""Blocks that go at a time, as a tier is kept a little below full."""


class Tier:
    """A tier of some blocks; its policy is told of what leaves, not of what comes."""

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        """Start empty."""
        capacity = num_blocks * BLOCK_BYTES
        geometry = Geometry(
            capacity=capacity, slab_bytes=capacity, slot_min=BLOCK_BYTES, holders_max=1
        )
        memory = bytearray(geometry.table_bytes)
        self.tables = Tables(memory, geometry, has_data=False, has_undo=False)
        self.policy = policy
        self.num_blocks = num_blocks
        self._num_free = num_blocks
        self._ranked = max(_RANKED_MIN, int(_RANKED_SHARE * num_blocks))
        self._victims = Victims(self.tables, policy, ranked=self._ranked)
        self._step = max(_STEP_MIN, int(_STEP_SHARE * num_blocks))

    def find(self, keys: Array) -> Array:
        """Return the slots of the longest run of leading `keys`."""
        return lease.match(self.tables, keys, [_WANTED])[1][_WANTED]

    def find_any(self, keys: Array) -> Array:
        """Return the slot of each of `keys`, -1 where there is none."""
        return key_index.find(self.tables, keys, _PART)

    def touch(self, used: Array) -> None:
        """Note that slots were used, so that they do not go before they are ranked again."""
        self.tables.slot_tick[used] = self.tables.next_tick()

    def victims(self, count: int, *, protect: Array, now: float) -> Array:
        """Return what must go so that `count` blocks fit: none, or rather more than needed."""
        missing = count - self._num_free
        if missing <= 0:
            return np.empty(0, dtype=np.int64)
        return self._victims.take(max(missing, self._step), protect=protect, now=now)

    def evict(self, victims: Array) -> None:
        """Have blocks that `victims` chose leave."""
        slots.evict(self.tables, victims)
        self.policy.freed(victims)
        self._num_free += len(victims)

    def next_to_go(self, count: int, *, protect: Array, now: float) -> Array:
        """Return up to `count` slots to evict, or more if more are ranked at a time anyway."""
        return self._victims.take(max(count, self._ranked), protect=protect, now=now)

    def store(self, keys: Array, *, parent: Array | None, depth: int) -> slots.Reservation:
        """Store what is missing of `keys`, for which room was made; see `slots.reserve`."""
        made = self.reserve(keys, parent=parent, depth=depth)
        self.commit(made)
        return made

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
        self._num_free -= len(made.slots)
        return made

    def commit(self, made: slots.Reservation) -> None:
        """Have blocks found from now on for which slots were reserved."""
        slots.commit(self.tables, made, np.zeros(len(made.slots), dtype="<u8"))
