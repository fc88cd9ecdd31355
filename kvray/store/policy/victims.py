"""The next blocks of a tier to go, ranked many at a time."""

import numpy as np

from kvray.store.eviction import choose_victims, is_fit, keep_evictable
from kvray.store.policy.policy import Array, Policy
from kvray.store.tables import Tables

_NOTHING = np.empty(0, dtype=np.int64)


class Victims:
    """Blocks in the order in which they are to go; those used since they were ranked stay.

    All blocks of a tier are ranked at once, which costs the same for one victim as for thousands.
    """

    def __init__(self, tables: Tables, policy: Policy, *, ranked: int) -> None:
        """Rank the blocks of `tables` by `policy`, and keep the first `ranked` of them in mind."""
        self._tables = tables
        self._policy = policy
        self._ranked = ranked
        self._slots = _NOTHING
        self._ticks = _NOTHING
        self._is_protected = np.zeros(tables.geometry.num_slots, dtype=bool)

    def take(self, count: int, *, protect: Array, now: float) -> Array:
        """Return up to `count` slots to evict, in order: each can go if all before it do.

        Nothing is changed, and no lock is needed; but `keep_evictable` has the last word under it.

        Args:
            count: slots wanted.
            protect: slots that must stay.
            now: seconds, on the policy's clock.
        """
        found = self._next(count, protect)
        if len(found) < count:
            self._rank(count, protect, now)
            found, self._slots = self._slots[:count], self._slots[count:]
            self._ticks = self._ticks[count:]
        return found

    def _next(self, count: int, protect: Array) -> Array:
        tables = self._tables
        taken: Array = self._slots[:count]
        self._slots = self._slots[count:]
        ticks, self._ticks = self._ticks[:count], self._ticks[count:]
        taken = taken[tables.slot_tick.take(taken) == ticks]
        self._is_protected[protect] = True
        is_free = ~self._is_protected.take(taken)
        self._is_protected[protect] = False
        if (is_free & is_fit(tables, taken)).all():
            parents = tables.slot_parent.take(taken)
            going = np.bincount(parents[parents >= 0], minlength=tables.geometry.num_slots)
            if (going.take(taken) == tables.slot_children.take(taken)).all():
                return taken
        order = np.arange(len(taken), dtype=np.float64)
        return keep_evictable(tables, taken, protect=protect, rank=lambda _: order)

    def _rank(self, count: int, protect: Array, now: float) -> None:
        tables = self._tables
        self._slots = choose_victims(
            tables,
            max(count, self._ranked),
            within=np.arange(tables.geometry.num_slots),
            protect=protect,
            rank=lambda slots: self._policy.rank(slots, now=now),
        )
        self._ticks = tables.slot_tick[self._slots]
