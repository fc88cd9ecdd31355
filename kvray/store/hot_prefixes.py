"""Counts uses of blocks, and finds the prefixes that are used most; pure, needs no lock."""

from typing import Any

import numpy as np

from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables

COUNTED_MAX = 65_535


class UseCounts:
    """Counts for people; the policy decides about blocks.

    Several uses between two looks count once, and it counts up to COUNTED_MAX. Six bytes a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self._count = np.zeros(num_slots, dtype=np.uint16)
        self._at = np.zeros(num_slots, dtype=np.float32)  # to a tenth of a second in two weeks

    @property
    def used_at(self) -> Array:
        """The time of each slot's last use, or that of its block's coming if none was seen."""
        return self._at

    def forget(self, slots: Array, *, now: float) -> None:
        """Note that other blocks are in `slots` since `now`."""
        self._count[slots] = 0
        self._at[slots] = now

    def note(self, slots: Array, *, now: float) -> None:
        """Note that the blocks in `slots` were used; `now` is in monotonic seconds."""
        self._count[slots] = np.minimum(self._count[slots], COUNTED_MAX - 1) + 1
        self._at[slots] = now

    def of(self, slots: Array) -> tuple[Array, Array]:
        """Return the uses of the blocks in `slots`, and the time of the last; 0: none was seen."""
        counts = self._count[slots]
        return counts, np.where(counts, self._at[slots], 0.0)


def hot_prefixes(
    tables: Tables, uses: UseCounts, *, namespace: int, most: int, now: float
) -> list[dict[str, Any]]:
    """Return up to `most` prefixes, the most and latest used first.

    A prompt whose blocks are all used alike is one prefix. Where prompts part, their common
    beginning is one more if it is used more often than each of them. `key` are the first 8 hex
    digits of a prefix's last key; of `uses`, several within some 100 ms count once.
    """
    slots = np.flatnonzero((tables.slot_state == READY) & (tables.slot_namespace == namespace))
    if not len(slots):
        return []
    slots = slots[tables.slot_part[slots] == tables.slot_part[slots].min()]
    counts, used_at = uses.of(slots)
    below = np.full(tables.geometry.num_slots, -1, dtype=np.int64)
    parents = tables.parents(slots).astype(np.int64)
    has_parent = parents >= 0
    np.maximum.at(below, parents[has_parent], counts[has_parent].astype(np.int64))
    is_end = counts > below[slots]
    slots, counts, used_at = slots[is_end], counts[is_end], used_at[is_end]
    depths = tables.slot_depth[slots].astype(np.int64)
    order = np.lexsort((-depths, -used_at, -counts.astype(np.int64)))[:most]
    keys = tables.slot_key[slots[order]]
    rows = zip(keys, depths[order], counts[order], used_at[order], strict=True)
    return [
        {
            "key": key.tobytes().hex()[:8],
            "num_blocks": int(depth) + 1,
            "uses": int(count),
            "used_s_ago": max(0.0, float(now - at)) if count else None,
        }
        for key, depth, count, at in rows
    ]
