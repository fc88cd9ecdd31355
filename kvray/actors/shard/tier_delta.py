"""The changes of one tier of a node since the lookup was told."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvray.index import PARTS_MAX
from kvray.store.arena import key_index
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.arena.tables import Array, Tables

ChangesSince = Callable[[Array], tuple[Array, Array, Array]]
"""See `ArenaOwner.changes_since`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Blocks: keys, u64 of shape [num_blocks, 4], and the part of each."""

    keys: Array
    parts: Array
    is_corrupt: Array | None = None
    """Of blocks that have gone, a mask of those whose bytes were wrong."""

    def __len__(self) -> int:
        return len(self.parts)

    def chosen(self, mask: Array) -> "Entries":
        """Return those in `mask`."""
        return Entries(keys=self.keys[mask], parts=self.parts[mask])


class TierDelta:
    """The blocks of one tier, from its tables; single-threaded."""

    def __init__(
        self, tables: Callable[[], Tables], changes_since: ChangesSince, *, every_s: float = 0.0
    ) -> None:
        """Have told nothing yet: every block counts as a change.

        `tables` is asked each time, because they may be mapped memory. Looks are `every_s` apart.
        """
        self._tables = tables
        self._every_s = every_s
        self._look_at = 0.0
        self._changes_since = changes_since
        versions, rows = tables().slot_version, tables().geometry.num_slots
        # A version no slot has, so that what an adopted tier holds counts as a change.
        self._seen = np.where(versions == 0, versions, versions - np.uint32(1))
        self._held = np.zeros(rows, dtype=bool)
        self._keys = np.zeros((rows, 4), dtype="<u8")
        self._parts = np.zeros(rows, dtype=np.uint32)
        self.num_held = np.zeros(PARTS_MAX, dtype=np.int64)
        """Blocks that are held of each part."""

    def collect(self) -> tuple[Entries, Entries] | None:
        """Return (removed, added) since the last look; None if nothing has changed."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + self._every_s
        slots, ready, keys = self._changes_since(self._seen)
        if not len(slots):
            return None
        parts = self._tables().slot_part[slots]
        # One engine's absurd part must not have everything refused that the shard announces.
        ready &= parts < PARTS_MAX
        # A block that `stands_in` counted as told before this look, or that came back to its slot.
        same = ready & self._held[slots] & (self._parts[slots] == parts)
        same &= (self._keys[slots] == keys).all(axis=1)
        slots, ready, keys, parts = slots[~same], ready[~same], keys[~same], parts[~same]
        was_held = slots[self._held[slots]]
        is_corrupt = self._tables().slot_state[was_held] == QUARANTINED
        gone = Entries(
            keys=self._keys[was_held], parts=self._parts[was_held], is_corrupt=is_corrupt
        )
        come = Entries(keys=keys[ready], parts=parts[ready])
        self.num_held += np.bincount(come.parts, minlength=PARTS_MAX)
        self.num_held -= np.bincount(gone.parts, minlength=PARTS_MAX)
        self._held[slots] = ready
        self._keys[slots], self._parts[slots] = keys, parts
        return gone, come

    def held(self) -> Entries:
        """Return everything that was told and has not been removed since."""
        return Entries(keys=self._keys[self._held], parts=self._parts[self._held])

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
            told_other |= self._parts[slots] != part
            # The end of another block, which was told of this slot, is to be told at the next look.
            found = (slots >= 0) & (tables.slot_state[slots] == READY)
            found &= ~(self._held[slots] & told_other)
            rows, slots = rows[found], slots[found]
            self.num_held[part] += np.count_nonzero(~self._held[slots])
            self._held[slots], self._parts[slots] = True, part
            self._keys[slots] = entries.keys[rows]
            here[rows] = True
        return here
