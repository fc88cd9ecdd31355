"""What a tier has, as a lookup's index knows it: it is announced, whole batches at a time."""

from __future__ import annotations

import numpy as np

from kvray.index import Index
from kvray.store.layout import READY
from kvray.store.tables import Array, Tables

_SHARD = "replay"


class Announced:
    """The index of a lookup to which one shard announces, as `Announcer` does, what it has.

    What came and went again in between is not announced at all.
    """

    def __init__(self, tables: Tables) -> None:
        """Announce what is in `tables`, which are empty."""
        self._tables = tables
        self._index = Index()
        self._seen = tables.slot_version.copy()
        self._is_held = np.zeros(len(self._seen), dtype=bool)
        self._held_keys = np.zeros_like(tables.slot_key)

    def __len__(self) -> int:
        """Return how many blocks the index knows."""
        return len(self._index)

    def announce(self) -> None:
        """Have the index know what changed since the last time."""
        tables = self._tables
        slots = np.flatnonzero(tables.slot_version != self._seen)
        self._seen[slots] = tables.slot_version[slots]
        removed = self._held_keys[slots[self._is_held[slots]]]
        is_ready, keys = tables.slot_state[slots] == READY, tables.slot_key[slots]
        self._is_held[slots], self._held_keys[slots] = is_ready, keys
        added = keys[is_ready]
        self._index.remove(_SHARD, removed.tobytes(), [0] * len(removed))
        self._index.add(_SHARD, added.tobytes(), [0] * len(added))

    def locate(self, keys: Array) -> Array:
        """Return a mask of `keys`: those that the index has a holder of."""
        found = np.zeros(len(keys), dtype=bool)
        start = 0
        for run in self._index.locate(keys.tobytes()):
            found[start : run.stop] = bool(run.holders)
            start = run.stop
        return found
