"""Decides which blocks leaving the host tier are written to disk: most are never used again."""

from typing import Any, Protocol

import numpy as np

from kvray.store.arena.layout import Array
from kvray.store.policy.gittins import Gittins
from kvray.store.policy.policy import Policy, Use

_LIKELY = 0.05
"""The least chance of another use for which a block is worth its write."""


class Admission(Protocol):
    """Decides on blocks of the host tier. Single-threaded, no clock, no I/O.

    It hears the events of a `Policy`; an event that it does not define does nothing.
    """

    def used(self, use: Use) -> None:
        """Note an event as `Policy.used` does."""
        return

    def stored(self, use: Use) -> None:
        """Note an event as `Policy.stored` does."""
        return

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        """Note an event as `Policy.copied` does; the source is this one."""
        return

    def admits(self, slots: Array, names: Array, *, now: float) -> Array:
        """Return a mask of the leaving blocks in `slots`: those to write."""


class Everything(Admission):
    """Admits every block."""

    def __init__(self, num_slots: int, policy: Policy) -> None:
        pass

    def admits(self, slots: Array, names: Array, *, now: float) -> Array:
        return np.ones(len(slots), dtype=bool)


class Twice(Admission):
    """Admits a block that was found since it was stored, or that leaves for the second time.

    It remembers as many blocks that left as the tier has slots.
    """

    def __init__(self, num_slots: int, policy: Policy) -> None:
        self._ghosts_max = num_slots
        self._ghosts: dict[int, None] = {}
        self._was_found = np.zeros(num_slots, dtype=bool)

    def used(self, use: Use) -> None:
        self._was_found[use.slots] = True

    def stored(self, use: Use) -> None:
        self._was_found[use.slots] = False

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        self._was_found[slots] = self._was_found[theirs]

    def admits(self, slots: Array, names: Array, *, now: float) -> Array:
        admitted: Array = self._was_found[slots]
        admitted |= np.array([name in self._ghosts for name in names.tolist()], dtype=bool)
        for name in names[~admitted].tolist():
            self._ghosts.pop(name, None)
            self._ghosts[name] = None
        while len(self._ghosts) > self._ghosts_max:
            del self._ghosts[next(iter(self._ghosts))]
        return admitted


class Likely(Admission):
    """Admits a block that is likely enough to be used again, as `Gittins` has learned."""

    def __init__(self, num_slots: int, policy: Policy) -> None:
        """Learn from `policy` if it is a `Gittins`, else beside it."""
        self._is_own = not isinstance(policy, Gittins)
        self._learner = policy if isinstance(policy, Gittins) else Gittins(num_slots)

    def used(self, use: Use) -> None:
        if self._is_own:
            self._learner.used(use)

    def stored(self, use: Use) -> None:
        if self._is_own:
            self._learner.stored(use)

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        if self._is_own:
            self._learner.copied(slots, self._learner, theirs)

    def admits(self, slots: Array, names: Array, *, now: float) -> Array:
        admitted: Array = self._learner.chance(slots, now=now) >= _LIKELY
        return admitted
