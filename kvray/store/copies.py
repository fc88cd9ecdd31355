"""Which blocks of an arena are extra copies, and which of those go first; pure, needs no lock.

Of the nodes that have a block one counts as its original, the same one for all of them: the first
by a hash of chain and node. The others' are extra. So two nodes that let their extra copy go at the
same time still leave the original, and of a chain one node keeps all.

Whoever asks the lookup notes here what it has found.
"""

from collections.abc import Callable, Mapping

import numpy as np
import xxhash

from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables

FRESH_S = 15.0
"""What was found longer ago counts for nothing: the others' blocks may have gone."""
_PIECE = 65_536
_COMING = 2
"""So many times what came between two choices comes until evictions have followed the last one."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


class CopyMarks:
    """What was found of the blocks of one arena, by slot; two threads may note and read at once."""

    def __init__(self, num_slots: int) -> None:
        self._number = np.zeros(num_slots, dtype="<u8")
        """Of the block that was looked up, as a slot gets others; 0: none was."""
        self._at = np.zeros(num_slots)
        self._is_extra = np.zeros(num_slots, dtype=bool)
        self._goes_first = np.zeros(num_slots, dtype=bool)
        self._next = 0
        """The first slot of the next piece to look through."""
        self._num_new = 0
        """Extra copies that were found since the last choice."""
        self.num_bytes = 0
        """Bytes of the extra copies that are known."""

    def due(
        self,
        tables: Tables,
        used_at: Array,
        *,
        now: float,
        soon_s: float,
        again_s: float,
        most: int,
    ) -> Array:
        """Return up to `most` slots to look up now.

        Half of them are the extra copies unused for longest that were not looked up for `soon_s`.
        The others were never looked up, or not for `again_s`; each call goes through a piece of the
        slots. Blocks of unknown chains are left out: no node counts them as extra.
        """
        extra = self._extra(tables)
        extra = extra[self._at[extra] <= now - soon_s]
        extra = extra[_lowest(used_at[extra], most // 2)]
        start, stop = self._next, min(self._next + _PIECE, tables.num_backed)
        self._next = stop if stop < tables.num_backed else 0
        is_block = tables.slot_state[start:stop] == READY
        piece = start + np.flatnonzero(is_block & (tables.slot_head[start:stop] != 0))
        at = np.where(self._is_known(tables, piece), self._at[piece], -np.inf)
        is_old = (at <= now - again_s) & ~np.isin(piece, extra)
        rest = piece[is_old][_lowest(at[is_old], most - len(extra))]
        return np.concatenate((extra, rest))

    def note(self, slots: Array, numbers: Array, is_extra: Array, *, now: float) -> None:
        """Note what was found at `now` of the blocks that were in `slots` with these numbers."""
        was_extra = self._is_extra[slots] & (self._number[slots] == numbers)
        self._num_new += int(np.count_nonzero(is_extra & ~was_extra))
        self._number[slots] = numbers
        self._at[slots] = now
        self._is_extra[slots] = is_extra

    def choose(
        self,
        tables: Tables,
        used_at: Array,
        rank: Callable[[Array], Array],
        *,
        now: float,
        idle_s: float,
        bytes_max: int,
    ) -> None:
        """Choose the extra copies that go first: those unused for `idle_s`, those beyond a bound.

        Those of the highest `rank` stay, with as many as come until evictions have followed, within
        `bytes_max`.
        """
        extra = self._extra(tables)
        order = np.argsort(-rank(extra), kind="stable")
        sums = np.cumsum(tables.block_bytes(extra[order]))
        going = np.empty(len(extra), dtype=bool)
        mean_bytes = sums[-1] / len(extra) if len(extra) else 0.0
        going[order] = sums > bytes_max - _COMING * self._num_new * mean_bytes
        self._num_new = 0
        going |= now - used_at[extra] >= idle_s
        chosen = np.zeros(len(self._goes_first), dtype=bool)
        chosen[extra[going]] = True
        self._goes_first = chosen
        self.num_bytes = int(sums[-1]) if len(sums) else 0

    def are_extra(self, tables: Tables, slots: Array, *, now: float) -> Array:
        """Return a mask of those of `slots` whose blocks are extra copies, as found just now."""
        return self._fresh(tables, slots, self._is_extra, now)

    def go_first(self, tables: Tables, slots: Array, *, now: float) -> Array:
        """Return a mask of those of `slots` whose blocks go before all others."""
        return self._fresh(tables, slots, self._goes_first, now)

    def _fresh(self, tables: Tables, slots: Array, mask: Array, now: float) -> Array:
        found: Array = mask.take(slots)
        rows = np.flatnonzero(found)
        chosen = slots[rows]
        found[rows] = self._is_known(tables, chosen) & (self._at[chosen] >= now - FRESH_S)
        return found

    def _extra(self, tables: Tables) -> Array:
        """Return the slots of the extra copies that are known and still there."""
        extra = np.flatnonzero(self._is_extra[tables.backed])
        is_there = (tables.slot_state[extra] == READY) & self._is_known(tables, extra)
        self._is_extra[extra[~is_there]] = False
        there: Array = extra[is_there]
        return there

    def _is_known(self, tables: Tables, slots: Array) -> Array:
        known: Array = self._number[slots] == tables.slot_number[slots]
        return known


def are_extra(heads: Array, own: str, others: Mapping[str, Array]) -> Array:
    """Return a mask of the blocks of `own` that another holder has, and counts as the original.

    `heads` are the numbers of their chains, `others` masks of what other nodes have.
    """
    mine = _score(heads, own)
    extra = np.zeros(len(heads), dtype=bool)
    for other, has in others.items():
        extra |= has & (_score(heads, other) > mine)
    return extra


def _score(heads: Array, name: str) -> Array:
    """Return a number for a node and each chain; two that are equal make no block extra."""
    mixed = (heads.astype(np.uint64) ^ np.uint64(xxhash.xxh3_64_intdigest(name.encode()))) * _STEP
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    score: Array = mixed ^ (mixed >> _SHIFT)
    return score


def _lowest(values: Array, count: int) -> Array:
    """Return the places of the `count` lowest values, the lowest first."""
    places = np.arange(len(values))
    if 0 < count < len(values):
        places = np.sort(np.argpartition(values, count - 1)[:count])
    return places[np.argsort(values[places], kind="stable")[:count]]
