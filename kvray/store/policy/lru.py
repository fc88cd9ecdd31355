"""Lets the block go first that was used longest ago."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from kvray.store.policy.policy import Array, Policy, Use


class LRU(Policy):
    """Least recently used."""

    def __init__(self, num_slots: int, clock: Iterator[int] | None = None) -> None:
        """`clock` counts uses; tiers share it."""
        self._clock = count(1) if clock is None else clock
        self._last = np.zeros(num_slots)

    def used(self, use: Use) -> None:
        self._last[use.slots] = next(self._clock)

    def stored(self, use: Use) -> None:
        self.used(use)

    def copied(self, slots: Array, source: "LRU", theirs: Array) -> None:
        self._last[slots] = source._last[theirs]

    def beside(self, num_slots: int) -> "LRU":
        return LRU(num_slots, self._clock)

    def rank(self, slots: Array, *, now: float) -> Array:
        last: Array = self._last[slots]
        return last
