"""What was used longest ago goes first."""

import numpy as np

from kvray.store.policy.policy import Array, Use


class LRU:
    """Least recently used; see `Policy`."""

    def __init__(self, num_slots: int) -> None:
        """Rank blocks in slots 0 to `num_slots` - 1."""
        self._uses = 0
        self._last = np.zeros(num_slots)

    def used(self, use: Use) -> None:
        """See `Policy.used`."""
        self._uses += 1
        self._last[use.slots] = self._uses

    def stored(self, use: Use) -> None:
        """See `Policy.stored`."""
        self.used(use)

    def freed(self, slots: Array) -> None:
        """See `Policy.freed`."""

    def rank(self, slots: Array, *, now: float) -> Array:
        """See `Policy.rank`."""
        last: Array = self._last[slots]
        return last
