"""The blocks of a trace in one tier: many prompts' blocks come and go at a time."""

from __future__ import annotations

import numpy as np

from kvray.replay.tier import Tier
from kvray.replay.trace import Trace
from kvray.store.tables import Array

NOWHERE = -1


class Forest:
    """Where each block of a trace is in a tier.

    What costs some hundred microseconds for a prompt costs hardly more for many together.
    """

    def __init__(self, trace: Trace, tier: Tier, keys: Array) -> None:
        """Begin with none of the blocks there; `keys` has one for each."""
        self.slots: Array = np.full(trace.num_unique, NOWHERE, dtype=np.int64)
        """Of each block, `NOWHERE` where it is not there."""
        self._tier = tier
        self._keys = keys
        self._parents = trace.parents()
        self._depths = trace.depths()
        # Slot -> the block that it had last.
        self._blocks = np.full(tier.tables.geometry.num_slots, NOWHERE, dtype=np.int64)

    def store(self, blocks: Array) -> Array:
        """Store blocks for which there is room, parents before their children.

        Returns:
            Those that were not stored, as the index of keys had no place for them: hardly ever any.
        """
        made = self._tier.reserve(self._keys[blocks], parent=None, depth=0)
        stored = blocks[: len(made.slots)]
        self.slots[stored] = made.slots
        self._blocks[made.slots] = stored
        self._join(made.slots, stored)
        self._tier.commit(made)
        return blocks[len(stored) :]

    def evict(self, blocks: Array) -> None:
        """Have blocks leave that `next_to_go` has returned: children no later than parents."""
        self._tier.evict(self.slots[blocks])
        self.slots[blocks] = NOWHERE

    def next_to_go(self, count: int, *, protect: Array, now: float) -> Array:
        """Return up to `count` blocks in the order in which they go; see `Tier.next_to_go`."""
        slots = self._tier.next_to_go(count, protect=self.slots[protect], now=now)
        found: Array = self._blocks[slots]
        return found

    def _join(self, made: Array, blocks: Array) -> None:
        """Link what was reserved as if it were one chain to the parents that it really has."""
        tables, above = self._tier.tables, self._parents[blocks]
        parents = np.where(above >= 0, self.slots[above], NOWHERE)
        tables.slot_depth[made] = self._depths[blocks]
        tables.put(made, slot_parent=parents, slot_children=0)
        tables.add(parents[parents >= 0], slot_children=1)
