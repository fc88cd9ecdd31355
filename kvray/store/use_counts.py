"""Counts how often the blocks of an arena were found since they came, and when last; pure."""

import numpy as np

from kvray.store.arena.tables import Array, Tables


class UseCounts:
    """Counts for people; the policy decides about blocks.

    Several uses between two looks count once. A slot's count ends with the block in it.
    """

    def __init__(self, num_slots: int) -> None:
        self._number = np.zeros(num_slots, dtype="<u8")
        self._count = np.zeros(num_slots, dtype=np.uint32)
        self._at = np.zeros(num_slots)

    def note(self, tables: Tables, slots: Array, *, now: float) -> None:
        """Note that the blocks in `slots` were used; `now` is in monotonic seconds."""
        numbers = tables.slot_number[slots]
        same = self._number[slots] == numbers
        self._count[slots] = np.where(same, self._count[slots], 0) + 1
        self._number[slots], self._at[slots] = numbers, now

    def of(self, tables: Tables, slots: Array) -> tuple[Array, Array]:
        """Return the uses of the blocks in `slots`, and the time of the last; 0: none was seen."""
        same = self._number[slots] == tables.slot_number[slots]
        return np.where(same, self._count[slots], 0), np.where(same, self._at[slots], 0.0)
