"""One tier of a replay: the blocks in it and those that go next, under a policy; no bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvray.store.arena.eviction import leaves_first
from kvray.store.arena.tables import Array
from kvray.store.policy import Policy
from kvray.store.replay.trace import NO_PARENT, Trace

NOWHERE = -1
_RANKED_SHARE, RANKED_MIN = 0.05, 96
"""Blocks that are ranked at a time."""


class Tier:
    """The blocks of a trace in one tier; each is here with all its ancestors.

    Blocks go in the order of the last ranking. Those used since stay, and so do their ancestors,
    which were used with them.
    """

    def __init__(
        self, trace: Trace, policy: Policy, num_blocks: int, *, ranked_min: int = RANKED_MIN
    ) -> None:
        self.policy = policy
        self.slots: Array = np.full(trace.num_unique, NOWHERE, dtype=np.int64)
        """Of each block; the policy knows blocks by their slots."""
        self.leaving: Callable[[Array, float], None] = lambda going, now: None
        """Takes blocks that are about to go, and the time."""
        self._parents, self._depths = trace.parents, trace.depths
        self._blocks = np.full(num_blocks, NOWHERE, dtype=np.int64)
        self._free = list(range(num_blocks))
        self._step = max(ranked_min, int(_RANKED_SHARE * num_blocks))
        # The next block to go is the last one.
        self._ranked: list[int] = []
        self._num_rankings = 0
        self._used_after = np.full(trace.num_unique, -1, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Blocks for which there is room."""
        return len(self._free)

    def has(self, blocks: Array) -> Array:
        """Return a mask of the `blocks` that are here."""
        mask: Array = self.slots.take(blocks) != NOWHERE
        return mask

    def use(self, blocks: Array) -> None:
        """Note that blocks and all their ancestors were used: they stay, as far as they can."""
        self._used_after[blocks] = self._num_rankings

    def store(self, blocks: Array) -> None:
        """Put blocks, for which there is room, here; the caller tells the policy."""
        first = len(self._free) - len(blocks)
        slots = self._free[first:]
        del self._free[first:]
        self.slots[blocks] = slots
        self._blocks[slots] = blocks

    def make_room(self, count: int, *, protect: Array, now: float) -> None:
        """Let `count` blocks go, or as many as can; `protect` and its ancestors stay."""
        count -= self._let_go(count, now)
        if count > 0:
            self._rank(max(count, self._step), protect, now)
            self.use(protect)
            self._let_go(count, now)

    def _rank(self, count: int, protect: Array, now: float) -> None:
        slots = np.flatnonzero(self._blocks != NOWHERE)
        above = self._parents[self._blocks[slots]]
        parents = np.where(above == NO_PARENT, NOWHERE, self.slots[above])
        num_children = np.bincount(parents[parents != NOWHERE], minlength=len(self._blocks))
        can_go = np.ones(len(self._blocks), dtype=bool)
        can_go[self.slots[protect]] = False
        parents, slots = parents[can_go[slots]], slots[can_go[slots]]
        going = leaves_first(
            slots,
            self.policy.rank(slots, now=now),
            parents=parents,
            num_children=num_children[slots],
            depths=self._depths[self._blocks[slots]],
        )
        self._ranked = self._blocks[going[:count]][::-1].tolist()
        self._num_rankings += 1

    def _let_go(self, count: int, now: float) -> int:
        """Let the next `count` blocks go, or as many as are ranked; return how many."""
        found: list[int] = []
        while self._ranked and len(found) < count:
            block = self._ranked.pop()
            if self._used_after[block] != self._num_rankings:
                found.append(block)
        if found:
            going = np.array(found)
            self.leaving(going, now)
            slots = self.slots[going]
            self.slots[going] = self._blocks[slots] = NOWHERE
            self._free += slots.tolist()
        return len(found)
