"""Which blocks of a node stay: a policy that follows what happens in its arena. Thread-safe."""

import threading
import time

import numpy as np

from kvray.store.arena import Arena
from kvray.store.policy import ADMISSIONS, POLICIES
from kvray.store.policy.observer import Observer
from kvray.store.tables import Array


class Retention:
    """The policy of an arena, and what it admits to the tier below.

    The lock guards the policy, which many ask; it is kept for a look at the tables or a ranking,
    never for I/O.
    """

    def __init__(self, arena: Arena, policy: str, admission: str) -> None:
        """Decide by the names in `POLICIES` and `ADMISSIONS`."""
        num_slots = arena.tables.geometry.num_slots
        self._tables = arena.tables
        self._lock = threading.Lock()
        self._policy = POLICIES[policy](num_slots)
        self._admission = ADMISSIONS[admission](num_slots, self._policy)
        self._observer = Observer(arena.tables, lambda: arena.section(arena.lock_wait_s))

    def observe(self) -> None:
        """Learn from what has happened in the arena since the last time."""
        with self._lock:
            self._observer.observe(self._policy, self._admission, now=time.monotonic())

    def rank(self, slots: Array) -> Array:
        """Return a number for each of `slots`, f8: the lowest is to go first."""
        with self._lock:
            ranks = self._policy.rank(slots, now=time.monotonic())
        # What was given up goes before all others.
        ranks[self._tables.slot_tick[slots] == 0] = -np.inf
        return ranks

    def admits(self, slots: Array) -> Array:
        """Return a mask of the blocks that are worth their write to the tier below."""
        names = self._tables.slot_key[slots, 0].view(np.int64)
        with self._lock:
            return self._admission.admits(slots, names, now=time.monotonic())
