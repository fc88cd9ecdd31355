"""The changes of one tier of a node since the lookup was told."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvray.index import PARTS_MAX
from kvray.store.arena import key_index
from kvray.store.arena.events import EventReader
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.arena.tables import Array, Tables

Section = Callable[[], AbstractContextManager[bool]]
"""Keeps the tables still; False: not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Blocks: keys, u64 of shape [num_blocks, 4], part and head number of each."""

    keys: Array
    parts: Array
    heads: Array
    is_corrupt: Array | None = None
    """Of blocks that have gone, a mask of those whose bytes were wrong."""

    def __len__(self) -> int:
        return len(self.parts)

    def chosen(self, mask: Array) -> "Entries":
        """Return those in `mask`."""
        return Entries(keys=self.keys[mask], parts=self.parts[mask], heads=self.heads[mask])


class TierDelta:
    """The blocks of one tier, from its tables; single-threaded."""

    def __init__(self, tables: Callable[[], Tables], section: Section) -> None:
        """Have told nothing yet: every block counts as a change.

        `tables` is asked each time, because they may be mapped memory.
        """
        self._tables = tables
        self._section = section
        self._events = EventReader()
        rows = tables().geometry.num_slots
        # What was told of each slot: part + 1, or 0 for nothing; it takes 38 bytes a slot.
        self._held = np.zeros(rows, dtype=np.uint16)
        self._keys = np.zeros((rows, 4), dtype="<u8")
        self._heads = np.zeros(rows, dtype=np.uint32)
        self.num_held = np.zeros(PARTS_MAX, dtype=np.int64)
        """Blocks that are held of each part."""

    @property
    def is_behind(self) -> bool:
        """Whether there are slots that it has never looked at, or not since it was overtaken."""
        return self._events.is_behind(self._tables())

    def collect(self) -> tuple[Entries, Entries] | None:
        """Return (removed, added) since the last look; None if nothing has changed.

        A slot may have changed more than once. The first looks go through a tier in pieces.
        """
        tables = self._tables()
        if not self._events.has_more(tables):
            return None
        with self._section() as entered:
            if not entered:
                return None
            slots = self._events.take(tables)
            ready, held = tables.slot_state.take(slots) == READY, self._held.take(slots)
            matters = ready | (held > 0)
            slots, ready, held = slots[matters], ready[matters], held[matters]
            keys, parts = tables.slot_key.take(slots, axis=0), tables.slot_part.take(slots)
            heads = tables.slot_head.take(slots)
            is_bad = tables.slot_state.take(slots) == QUARANTINED
        # One engine's absurd part must not have everything refused that the shard announces.
        ready &= parts < PARTS_MAX
        # A block that `stands_in` counted as told before this look, or that came back to its slot.
        same = ready & (held == parts + 1) & (self._keys.take(slots, axis=0) == keys).all(axis=1)
        was_held = (held > 0) & ~same
        gone = Entries(
            keys=self._keys[slots[was_held]],
            parts=held[was_held] - np.uint32(1),
            heads=self._heads[slots[was_held]],
            is_corrupt=is_bad[was_held],
        )
        is_new = ready & ~same
        come = Entries(keys=keys[is_new], parts=parts[is_new], heads=heads[is_new])
        self.num_held += np.bincount(come.parts, minlength=PARTS_MAX)
        self.num_held -= np.bincount(gone.parts, minlength=PARTS_MAX)
        self._held[slots[was_held]] = 0
        self._hold(slots[is_new], come)
        return (gone, come) if len(gone) or len(come) else None

    def held(self) -> Entries:
        """Return everything that was told and has not been removed since."""
        held = np.flatnonzero(self._held)
        parts = self._held[held] - np.uint32(1)
        return Entries(keys=self._keys[held], parts=parts, heads=self._heads[held])

    def _hold(self, slots: Array, entries: Entries) -> None:
        self._held[slots] = entries.parts + 1
        self._keys[slots], self._heads[slots] = entries.keys, entries.heads

    def stands_in(self, entries: Entries) -> Array:
        """Return a mask of the `entries` that are here now, so that their end is announced later.

        They count as told: they may be gone before the next look. Read without the lock.
        """
        tables = self._tables()
        here = np.zeros(len(entries), dtype=bool)
        for part in np.unique(entries.parts).tolist():
            rows = np.flatnonzero(entries.parts == part)
            slots = key_index.find(tables, entries.keys[rows], part)
            told_other = (self._keys[slots] != entries.keys[rows]).any(axis=1)
            told_other |= self._held[slots] != part + 1
            # The end of another block, which was told of this slot, is to be told at the next look.
            found = (slots >= 0) & (tables.slot_state[slots] == READY)
            found &= ~((self._held[slots] > 0) & told_other)
            rows, slots = rows[found], slots[found]
            self.num_held[part] += np.count_nonzero(self._held[slots] == 0)
            told = entries.chosen(rows)
            # Where one of the two was told with an unknown head, the end of it must be too.
            is_known = (self._held[slots] == 0) | (self._heads[slots] == told.heads)
            self._hold(slots, told)
            self._heads[slots[~is_known]] = 0
            here[rows] = True
        return here
