"""One tier of a replay, whose tables follow later: which blocks are in it, and which go next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvray.lab.replay.tier import Tier
from kvray.lab.replay.trace import Trace
from kvray.store.arena.tables import Array
from kvray.store.policy import Policy

NOWHERE = -1
_NOTHING = np.empty(0, dtype=np.int64)


class Level:
    """The blocks of a trace in one tier, with tables and a policy that follow in batches.

    The content of a tier follows from what was there, what has come and what has gone. So tables
    and policy need not follow until blocks are to be ranked; then they follow for many requests
    together, which costs hardly more than for one. Blocks used since the last ranking stay, and so
    do their ancestors, which were used with them. The others go in the order of the ranking, as if
    each request had been finished before the next one came.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        num_blocks: int,
        keys: Array,
        *,
        settle: Callable[[float], None],
        is_below: bool = False,
    ) -> None:
        """Start empty, with room for `num_blocks`; `is_below`: blocks come from a level above.

        `settle` lets the tables and policies of all levels follow, up to a time; it calls `follow`
        and `store`.
        """
        self.tier = Tier(num_blocks, policy, is_below=is_below)
        self.slots: Array = np.full(trace.num_unique, NOWHERE, dtype=np.int64)
        """Of each block, by the tables."""
        self.is_here = np.zeros(trace.num_unique, dtype=bool)
        """Of each block, also where the tables do not know it yet."""
        self.num_free = num_blocks
        self.leaving: Callable[[Array, float], None] = lambda going, now: None
        """Takes blocks that are about to go, and the time, while the tables still have them."""
        self._settle = settle
        self._keys, self._parents, self._depths = keys, trace.parents(), trace.depths()
        # Slot -> its last block.
        self._blocks = np.full(self.tier.tables.geometry.num_slots, NOWHERE, dtype=np.int64)
        # How often blocks were ranked, and how often before the last use of each.
        self._ranking = 0
        self._used_after = np.full(trace.num_unique, -1, dtype=np.int64)
        self._ranked, self._ranked_at = _NOTHING, 0
        # Blocks that have gone since the tables followed.
        self._gone: list[Array] = []

    def use(self, blocks: Array) -> None:
        """Note that blocks, with all their ancestors, were used: they stay, as far as they can."""
        self._used_after[blocks] = self._ranking

    def enter(self, blocks: Array) -> None:
        """Note that blocks, for which there is room, are here from now on; see `store`."""
        self.is_here[blocks] = True
        self.num_free -= len(blocks)

    def make_room(self, count: int, *, protect: Array, now: float) -> None:
        """Let `count` blocks go, or as many as can; `protect` and its ancestors stay."""
        count -= self._let_go(count, now)
        if count > 0:
            self._settle(now)
            slots = self.tier.next_to_go(count, protect=self.slots[protect], now=now)
            self._ranked, self._ranked_at = self._blocks[slots], 0
            self._ranking += 1
            self._used_after[protect] = self._ranking
            self._let_go(count, now)

    def follow(self) -> None:
        """Let the tables follow the blocks that have gone."""
        if self._gone:
            self.evict(np.concatenate(self._gone))
            self._gone.clear()

    def evict(self, blocks: Array) -> None:
        """Take blocks out of the tables: children no later than their parents."""
        self.tier.evict(self.slots[blocks])
        self.slots[blocks] = NOWHERE

    def store(self, blocks: Array) -> None:
        """Put blocks that entered into the tables, parents before their children."""
        made = self.tier.reserve(self._keys[blocks], parent=None, depth=0)
        # Some are dropped where the index of keys has no place for them, which is rare.
        stored, dropped = np.split(blocks, [len(made.slots)])
        self.slots[stored] = made.slots
        self._blocks[made.slots] = stored
        self._join(made.slots, stored)
        self.tier.commit(made)
        self.is_here[dropped] = False
        self.num_free += len(dropped)

    def _join(self, made: Array, blocks: Array) -> None:
        """Link slots, which were reserved like one chain, to the parents that they really have."""
        tables, above = self.tier.tables, self._parents[blocks]
        parents = np.where(above >= 0, self.slots[above], NOWHERE)
        tables.slot_depth[made] = self._depths[blocks]
        tables.put(made, slot_parent=parents, slot_children=0)
        tables.add(parents[parents >= 0], slot_children=1)

    def _let_go(self, count: int, now: float) -> int:
        """Let the next `count` blocks go, or as many as are ranked; return how many."""
        found, missing = [_NOTHING], count
        while missing > 0 and self._ranked_at < len(self._ranked):
            some = self._ranked[self._ranked_at : self._ranked_at + missing]
            self._ranked_at += len(some)
            unused = some[self._used_after.take(some) != self._ranking]
            found.append(unused)
            missing -= len(unused)
        going = np.concatenate(found)
        if len(going):
            self.leaving(going, now)
            self.is_here[going] = False
            self.num_free += len(going)
            self._gone.append(going)
        return len(going)


def names_of(keys: Array) -> Array:
    """Return the names by which policies know blocks: the first 8 bytes of their keys."""
    return np.ascontiguousarray(keys[:, 0]).view(np.int64)
