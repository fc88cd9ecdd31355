"""S3-FIFO: new blocks on probation in a small queue, a main one for blocks used there.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. The queues are
kept as numbers of their blocks, and turned when blocks have left them.
"""

from collections import OrderedDict

import numpy as np

from kvray.store.policy.policy import Array, Policy, Use

_SMALL_SHARE = 0.1
_USES_MAX = 3
_AFTER = 2.0**60
"""Added to the rank of a block that goes only when no other is left."""


class S3FIFO(Policy):
    """New blocks on probation in a small queue, a main queue for blocks that were used there."""

    def __init__(self, num_slots: int) -> None:
        self._ghosts_max = num_slots
        # Names of blocks that left the small queue, the oldest first. In a plain dict the first one
        # is the harder to find, the more were deleted before it.
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._next = 1
        # Place in its queue; 0: in none.
        self._place = np.zeros(num_slots, dtype=np.int64)
        self._uses = np.zeros(num_slots, dtype=np.uint8)
        self._is_main = np.zeros(num_slots, dtype=bool)
        self._name = np.zeros(num_slots, dtype=np.int64)

    def used(self, use: Use) -> None:
        self._uses[use.slots] = np.minimum(self._uses[use.slots] + 1, _USES_MAX)

    def stored(self, use: Use) -> None:
        self._enter(use.slots, use.names)

    def freed(self, slots: Array) -> None:
        main, small = slots[self._is_main[slots]], slots[~self._is_main[slots]]
        for name in self._name[small].tolist():
            self._ghosts.pop(name, None)
            self._ghosts[name] = None
        while len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)
        behind_small = self._place[small].max(initial=0)
        behind_main = self._place[main].max(initial=0)
        self._place[slots] = 0
        self._turn(behind_small, behind_main)

    def copied(self, slots: Array, source: "S3FIFO", theirs: Array) -> None:
        """A block that was here before counts as used."""
        is_new = self._place[slots] == 0
        old = slots[~is_new]
        self._uses[old] = np.maximum(self._uses[old], source._uses[theirs[~is_new]])
        self._enter(slots[is_new], source._name[theirs[is_new]])

    def beside(self, num_slots: int) -> "S3FIFO":
        return S3FIFO(num_slots)

    def rank(self, slots: Array, *, now: float) -> Array:
        is_main = self._is_main[slots]
        place: Array = self._place[slots].astype(np.float64)
        ranks: Array = place + self._next * np.where(is_main, 1.0 + self._uses[slots], 0)
        small = np.flatnonzero(~is_main)
        num_due = len(small) - int(_SMALL_SHARE * len(slots))
        if num_due <= 0:
            ranks[small] += _AFTER
        elif num_due < len(small):
            order = np.argpartition(place[small], num_due)
            ranks[small[order[num_due:]]] += _AFTER
        # A block used on probation would only move to the main queue.
        ranks[small[self._uses[slots[small]] > 1]] += 2 * self._next
        return ranks

    def _enter(self, slots: Array, names: Array) -> None:
        """Put new blocks on probation, and those that were ghosts into the main queue."""
        known = [name in self._ghosts for name in names.tolist()]
        for name in names[known].tolist():
            self._ghosts.pop(name, None)
        self._uses[slots], self._name[slots], self._is_main[slots] = 0, names, known
        # Of one prompt the last block is the first to go.
        self._enqueue(slots[::-1])

    def _turn(self, small: int, main: int) -> None:
        """Move the blocks before these places that stay to the end of the main queue."""
        passed = np.flatnonzero(
            (self._place > 0)
            & (self._place < np.where(self._is_main, main, small))
            & (self._uses > np.where(self._is_main, 0, 1))
        )
        if not len(passed):
            return
        self._uses[passed] = np.where(self._is_main[passed], self._uses[passed] - 1, 0)
        self._is_main[passed] = True
        self._enqueue(passed[np.argsort(self._place[passed])])

    def _enqueue(self, slots: Array) -> None:
        self._place[slots] = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
