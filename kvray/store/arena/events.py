"""What has happened in an arena since somebody's last look: slots that came, went, or were used.

Whoever makes a slot READY, ends that, or leases it as a use, notes its number in a ring of the
tables, in the same step. So a look costs what has happened since the last one, and not what the
arena has. A reader that was overtaken looks at all slots again, a piece at a time, as at first.

Why nothing is missed: a step notes before it ends, and a reader reads under the lock. So what a
reader sees of the tables is no older than the notes behind which it goes on. The note of a step
that was undone costs a look in vain.
"""

import numpy as np

from kvray.store.arena.layout import NO_SLOTS
from kvray.store.arena.tables import Array, Tables

_PIECE = 32_768
"""Slots that one look goes through of those that it has to look at without a note."""


class EventReader:
    """One reader's place in the ring; at first all slots are to be looked at."""

    def __init__(self) -> None:
        self._read = -1
        """Count of events before which it has read everything; -1: nothing."""
        self._scan_at = 0
        """The first slot that it has not looked at since it was overtaken."""

    def has_more(self, tables: Tables) -> bool:
        """Return whether anything is to be looked at; needs no lock."""
        return self._read != tables.events or self.is_behind(tables)

    def is_behind(self, tables: Tables) -> bool:
        """Return whether there are slots that it has not looked at since it was overtaken."""
        return self._scan_at < tables.num_backed

    def take(self, tables: Tables) -> Array:
        """Return slots to look at next, ascending, each once; the lock is held."""
        events, num_slots, rows = tables.events, tables.num_backed, len(tables.event_slot)
        noted = NO_SLOTS
        if self._read >= 0 and 0 <= events - self._read <= rows:
            at = np.arange(self._read, events) % rows
            noted = np.unique(tables.event_slot.take(at)).astype(np.int64)
            noted = noted[: np.searchsorted(noted, num_slots)]  # a damaged table may name others
        else:
            self._scan_at = 0
        self._read = events
        start, self._scan_at = self._scan_at, min(self._scan_at + _PIECE, num_slots)
        piece = np.arange(start, self._scan_at)
        if not len(piece):
            return noted
        return np.union1d(noted, piece) if len(noted) else piece
