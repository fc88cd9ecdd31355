"""One tier of a replay, whose tables follow later: what is there, and what goes next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvray.replay.forest import Forest
from kvray.replay.tier import Tier
from kvray.replay.trace import Trace
from kvray.store.policy import Policy
from kvray.store.tables import Array

_NOTHING = np.empty(0, dtype=np.int64)


class Level:
    """What is in a tier is known from what was there, what has come since, and what has gone since.

    So the tables and the policy need not follow until blocks are to be ranked, and then they follow
    for many requests together. What has been used since blocks were ranked stays, and so do its
    ancestors, which were used with it: the others may go in the order in which they were ranked, as
    if each request had been finished before the next one came.
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
        """Start empty.

        Args:
            trace: whose blocks come and go.
            policy: ranks them.
            num_blocks: for which there is room.
            keys: of all blocks.
            settle: has the tables and the policies of all levels follow, up to a time; calls
                `follow` and `store`.
            is_below: whether blocks come from a level above.
        """
        self.tier = Tier(num_blocks, policy, is_below=is_below)
        self.forest = Forest(trace, self.tier, keys)
        self.is_here = np.zeros(trace.num_unique, dtype=bool)
        """Of each block."""
        self.num_free = num_blocks
        self.leaving: Callable[[Array, float], None] = lambda going, now: None
        """Is told of blocks that are about to go, at a time, while the tables still have them."""
        self._settle = settle
        # How often blocks were ranked, and how often before the last use of each.
        self._ranking = 0
        self._used_after = np.full(trace.num_unique, -1, dtype=np.int64)
        # What was ranked, and up to where it was looked at.
        self._next, self._next_at = _NOTHING, 0
        # Blocks that have gone since the tables followed.
        self._gone: list[Array] = []

    def use(self, blocks: Array) -> None:
        """Note that blocks, with all their ancestors, were used: they stay, as far as they can."""
        self._used_after[blocks] = self._ranking

    def enter(self, blocks: Array) -> None:
        """Note that blocks are here from now on, for which there is room; see `store`."""
        self.is_here[blocks] = True
        self.num_free -= len(blocks)

    def make_room(self, count: int, *, protect: Array, now: float) -> None:
        """Have `count` blocks go, or as many as can.

        Args:
            count: blocks.
            protect: what stays, whatever happens, with all its ancestors.
            now: seconds.
        """
        count -= self._let_go(count, now)
        if count > 0:
            self._settle(now)
            self._next = self.forest.next_to_go(count, protect=protect, now=now)
            self._next_at = 0
            self._ranking += 1
            self._used_after[protect] = self._ranking
            self._let_go(count, now)

    def follow(self) -> None:
        """Have the tables follow what has gone."""
        if self._gone:
            self.forest.evict(np.concatenate(self._gone))
            self._gone.clear()

    def store(self, blocks: Array) -> None:
        """Have the tables follow what has come: blocks that entered, parents before children."""
        dropped = self.forest.store(blocks)
        if len(dropped):
            self.is_here[dropped] = False
            self.num_free += len(dropped)

    def _let_go(self, count: int, now: float) -> int:
        """Have the next `count` blocks go, or as many as are ranked; return how many."""
        found, missing = [_NOTHING], count
        while missing > 0 and self._next_at < len(self._next):
            some = self._next[self._next_at : self._next_at + missing]
            self._next_at += len(some)
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
