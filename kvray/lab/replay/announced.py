"""The content of tiers as a lookup's index knows it: announced, whole batches at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvray.index import Index
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables


class Announced:
    """The index of a lookup to which each tier announces its blocks, as a shard would.

    Blocks that came and went between two announcements are not announced at all.
    """

    def __init__(self, tiers: Sequence[Tables]) -> None:
        """Begin with the tables of `tiers`, which are empty."""
        self._index = Index()
        self._tiers = {f"tier{at}": _Announcer(tables) for at, tables in enumerate(tiers)}

    def __len__(self) -> int:
        """Return how many blocks the index knows."""
        return len(self._index)

    def announce(self) -> None:
        """Tell the index what changed since the last time."""
        for name, tier in self._tiers.items():
            removed, added = tier.changes()
            self._index.remove(name, removed.tobytes(), [0] * len(removed))
            self._index.add(name, added.tobytes(), [0] * len(added))

    def locate(self, keys: Array) -> Array:
        """Return which tiers have which of `keys`: a mask of shape [num_tiers, num_keys]."""
        found = np.zeros((len(self._tiers), len(keys)), dtype=bool)
        start = 0
        for run in self._index.locate(keys.tobytes()):
            found[:, start : run.stop] = [[name in run.holders] for name in self._tiers]
            start = run.stop
        return found


class _Announcer:
    """The blocks of one tier that are announced."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._seen = tables.slot_version.copy()
        self._is_held = np.zeros(len(self._seen), dtype=bool)
        self._held_keys = np.zeros_like(tables.slot_key)

    def changes(self) -> tuple[Array, Array]:
        """Return the keys that have gone, and those that have come, since the last time."""
        tables = self._tables
        slots = np.flatnonzero(tables.slot_version != self._seen)
        self._seen[slots] = tables.slot_version[slots]
        removed = self._held_keys[slots[self._is_held[slots]]]
        is_ready, keys = tables.slot_state[slots] == READY, tables.slot_key[slots]
        self._is_held[slots], self._held_keys[slots] = is_ready, keys
        return removed, keys[is_ready]
