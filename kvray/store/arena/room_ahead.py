"""The room that an arena's owner makes ahead of need, so that writers mostly find FREE slots.

It evicts the blocks of each size that were chosen to go next, and chooses more when they run out.
So a round costs what it evicts; the search among all blocks comes once for an eighth of them. A
size whose own blocks are younger than a whole slab of another size gets that slab.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvray.store.arena import eviction, slabs, victims
from kvray.store.arena.eviction import Rank
from kvray.store.arena.layout import NO_SLOTS
from kvray.store.arena.mapped import MappedArena
from kvray.store.arena.tables import Array

EVICT_BATCH = 256
"""Blocks that one section evicts: the lock is kept for a moment only."""

_DEMAND_ROUNDS = 2
"""So many times what writers took since the last round is kept free, up to a share of the arena."""
_DEMAND_SHARE = 16

_SLABS_MAX = 8
"""Slabs of other sizes that one round clears for a size."""

_LONG_LOOK_S = 0.02
_PAUSE_SHARE = 1.0
"""A search for the blocks that go next that takes long is followed by a pause, as long again."""


@dataclass(slots=True, kw_only=True)
class _Size:
    """What is known of a block size since the last round."""

    left: int = 0
    """Blocks that there was room for."""
    changes: int = -1
    """The arena's count of changes when the last search began."""
    search_at: float = 0.0
    """Time of `time.monotonic` before which there is no other."""


class RoomAhead:
    """Makes room for each block size; single-threaded."""

    def __init__(
        self,
        arena: MappedArena,
        section: Callable[[], AbstractContextManager[bool]],
        evict: Callable[[Array], int],
        let_go: Callable[[Array], None],
    ) -> None:
        """`evict` lets blocks go that still can, `let_go` those that can for sure, in a section."""
        self._arena = arena
        self._section = section
        self._evict = evict
        self._let_go = let_go
        self._sizes: dict[int, _Size] = {}

    def make(self, block_bytes: int, free_target: float, rank: Rank | None) -> int:
        """Evict until a share of the size's slots is free; return how many blocks went.

        Where writers take more than that share in two rounds, what they take is kept free.
        """
        tables = self._arena.tables
        size = self._sizes.setdefault(block_bytes, _Size())
        taken = max(0, size.left - slabs.num_available(tables, block_bytes))
        most = tables.geometry.num_slabs * slabs.usable(tables, block_bytes) // _DEMAND_SHARE
        demand = min(_DEMAND_ROUNDS * taken, most)
        evicted = 0
        if self._shortfall(block_bytes, free_target, demand):
            evicted = self._clear_older(block_bytes, free_target, demand)
        short = self._shortfall(block_bytes, free_target, demand)
        went = self._evict_queued(block_bytes, short)
        if self._is_search_due(block_bytes, size, is_short=went < short):
            went += self._search(block_bytes, size, max(0, short - went), rank)
        size.left = slabs.num_available(tables, block_bytes)
        return evicted + went

    def _shortfall(self, block_bytes: int, free_target: float, demand: int) -> int:
        tables = self._arena.tables
        short = slabs.shortfall(tables, block_bytes, free_target)
        return max(short, demand - slabs.num_available(tables, block_bytes))

    def _clear_older(self, block_bytes: int, free_target: float, demand: int) -> int:
        """Clear slabs of other sizes that were used before the next victim of this one."""
        tables, evicted = self._arena.tables, 0
        for _ in range(_SLABS_MAX):
            next_victim = victims.head(tables, block_bytes)
            among = victims.next_slabs(tables, block_bytes)[:1]
            if next_victim is None or not len(among):
                break
            last = slabs.last_used(tables, among)
            if not len(last) or last[0] >= slabs.use_order(tables, next_victim)[0]:
                break
            found = slabs.choose_to_clear(tables, 1, among=among, protect=NO_SLOTS)
            went = self._evict(found) if len(found) else 0
            with self._section() as entered:
                if entered:
                    victims.pass_slabs(tables, at_least=1)
            evicted += went
            if not self._shortfall(block_bytes, free_target, demand):
                break
        return evicted

    def _evict_queued(self, block_bytes: int, count: int) -> int:
        """Evict up to `count` blocks of those chosen ahead; return how many went."""
        evicted = 0
        while evicted < count:
            num = min(EVICT_BATCH, count - evicted)
            with self._section() as entered:
                going = victims.take(self._arena.tables, block_bytes, num if entered else 0)
                self._let_go(going)
            evicted += len(going)
            if len(going) < num:
                break
        return evicted

    def _is_search_due(self, block_bytes: int, size: _Size, *, is_short: bool) -> bool:
        """Whether to search among all blocks of a size for those that go next."""
        if time.monotonic() < size.search_at:
            return False
        tables = self._arena.tables
        most = victims.most(tables, block_bytes)
        is_near = slabs.num_available(tables, block_bytes) <= most
        is_low = 2 * victims.num_left(tables, block_bytes) < most
        return is_short or (is_near and is_low and tables.changes != size.changes)

    def _search(self, block_bytes: int, size: _Size, short: int, rank: Rank | None) -> int:
        """Choose the blocks of a size that go next, and evict the first `short` of them."""
        tables, began = self._arena.tables, time.monotonic()
        tick, size.changes = tables.tick, tables.changes
        count = short + victims.most(tables, block_bytes)
        within = slabs.slots_of(tables, block_bytes)
        found = eviction.choose_victims(tables, count, within=within, rank=rank)
        evicted = self._evict(found[:short])
        to_clear = slabs.coldest_first(tables, np.flatnonzero(tables.slab_block_bytes))
        with self._section() as entered:
            if entered:
                victims.put(tables, block_bytes, found[short:], tick=tick)
                victims.put_slabs(tables, to_clear)
        ended = time.monotonic()
        pause = _PAUSE_SHARE * (ended - began) if ended - began > _LONG_LOOK_S else 0
        size.search_at = ended + pause
        return evicted
