"""What was used longest ago goes first."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from kvray.store.policy.policy import Array, Use


class LRU:
    """Least recently used; see `Policy`."""

    keeps_order = True

    def __init__(self, num_slots: int, clock: Iterator[int] | None = None) -> None:
        """Rank blocks in slots 0 to `num_slots` - 1, by uses that `clock` counts."""
        self._clock = count(1) if clock is None else clock
        self._last = np.zeros(num_slots)

    def used(self, use: Use) -> None:
        """See `Policy.used`."""
        self._last[use.slots] = next(self._clock)

    def stored(self, use: Use) -> None:
        """See `Policy.stored`."""
        self.used(use)

    def freed(self, slots: Array) -> None:
        """See `Policy.freed`."""

    def answered(self, request: int, num_tokens: int) -> None:
        """See `Policy.answered`."""

    def copied(self, slots: Array, source: "LRU", theirs: Array) -> None:
        """See `Policy.copied`."""
        self._last[slots] = source._last[theirs]

    def beside(self, num_slots: int) -> "LRU":
        """See `Policy.beside`."""
        return LRU(num_slots, self._clock)

    def rank(self, slots: Array, *, now: float) -> Array:
        """See `Policy.rank`."""
        last: Array = self._last[slots]
        return last
