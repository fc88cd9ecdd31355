"""Decides which blocks of a node stay, by policies that follow its events. Thread-safe.

Uses are counted for people: `hot_prefixes` are those that are used most.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.store.arena import key_index
from kvray.store.arena.arena import Arena
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.copies import CopyMarks
from kvray.store.nvme.store import NvmeStore
from kvray.store.policy import ADMISSIONS, POLICIES, Policy
from kvray.store.policy.observer import Observer

_UNKNOWN = -1e30  # rank of blocks with nothing known but the last use: below all others
_EXTRA, _IDLE_S = -1e35, 1e6
"""Rank of extra copies that go before those, and the age that doubles it: the oldest go first."""
_NEW = 1e30  # rank of blocks that have come since the last look: above all others


class Retention:
    """The policies of an arena and of the store below it, and the store's admission.

    The lock guards the policies, which many threads ask. It is held for a look at tables or a
    ranking, never for I/O.
    """

    def __init__(self, arena: Arena, policy: str, admission: str) -> None:
        num_slots = arena.tables.geometry.num_slots
        self._arena = arena
        self._lock = threading.Lock()
        self._policy = POLICIES[policy](num_slots)
        self._admission = ADMISSIONS[admission](num_slots, self._policy)
        self._observer = Observer(lambda: arena.tables, lambda: arena.section(arena.lock_wait_s))
        self._below: _Below | None = None
        self.uses = UseCounts(num_slots)
        """Of the arena's blocks, for people and for copies; read without the lock."""
        self.copies = CopyMarks(num_slots)
        """Which of the arena's blocks others have too; read without the lock."""

    def put_below(self, store: NvmeStore) -> None:
        """Decide on the blocks of `store` too; existing ones rank by their last use."""
        with self._lock:
            num_slots = store.geometry.num_slots
            self._below = _Below(store, self._policy.beside(num_slots), np.zeros(num_slots, bool))

    def drop_below(self) -> None:
        """Decide on the arena alone from now on: the store below it will be closed."""
        with self._lock:
            self._below = None

    def observe(self) -> None:
        """Learn from the events in the arena since the last call, or of some if it is busy."""
        while self._look() and self._observer.is_behind:
            pass

    def _look(self) -> bool:
        with self._lock:
            now = time.monotonic()
            seen = self._observer.observe(self._policy, self._admission, now=now)
            if seen is None:
                return False
            self.uses.forget(seen.new, now=now)
            self.uses.note(seen.used, now=now)
            if self._below is not None and len(seen.used):
                # A use above counts below as well.
                slots = find_alike(self._arena.tables, seen.used, self._below.store.tables)
                both = slots >= 0
                self._below.take_over(slots[both], self._policy, seen.used[both])
                self._below.store.touch(slots[both])
            return True

    def rank(self, slots: Array) -> Array:
        """Return a number for each of `slots` of the arena, f8: the lowest goes first."""
        ranks, now = self.rank_alone(slots), time.monotonic()
        extra = self.copies.are_extra(self._arena.tables, slots, now=now)
        ranks[extra] = self._policy.rank_of_copies(ranks[extra])
        first = self.copies.go_first(self._arena.tables, slots, now=now)
        idle_s = now - self.uses.used_at[slots[first]]
        ranks[first] = _EXTRA * (1.0 + np.maximum(0.0, idle_s) / _IDLE_S)
        # Blocks that were given up go before all others.
        ranks[self._arena.tables.slot_tick[slots] == 0] = -np.inf
        return ranks

    def rank_alone(self, slots: Array) -> Array:
        """Return the ranks that `slots` of the arena would have if no other node had any block."""
        with self._lock:
            ranks = self._policy.rank(slots, now=time.monotonic())
            # The policy would take them for the blocks that were in their slots before.
            ranks[~self._observer.has_seen(slots)] = _NEW
        return ranks

    def admits(self, slots: Array) -> Array:
        """Return a mask of the arena's blocks that are worth their write to the tier below."""
        names = key_index.words_in(self._arena.tables, slots).view(np.int64)  # of part and key
        now = time.monotonic()
        with self._lock:
            admitted = self._admission.admits(slots, names, now=now)
        # Another node has it, and writes it itself if it is worth that.
        return admitted & ~self.copies.go_first(self._arena.tables, slots, now=now)

    # -- the tier below -----------------------------------------------------------------------

    def rank_below(self, slots: Array) -> Array:
        """Return a number for each of `slots` of the store, f8: the lowest goes first."""
        with self._lock:
            return np.zeros(len(slots)) if self._below is None else self._below.rank(slots)

    def demoted(self, slots: Array, copies: Array) -> None:
        """Note that `slots` of the store have the blocks of the arena's slots `copies`."""
        with self._lock:
            if self._below is not None:
                self._below.take_over(slots, self._policy, copies)

    def evicted_below(self, slots: Array) -> None:
        """Note that the blocks in `slots` of the store have gone."""
        with self._lock:
            if self._below is not None:
                self._below.is_known[slots] = False

    def promoted(self, copies: Array, slots: Array) -> None:
        """Note that the arena's slots `copies` have the blocks of the store's `slots`."""
        with self._lock:
            if self._below is not None:
                known = self._below.is_known[slots]
                self._policy.copied(copies[known], self._below.policy, slots[known])
                self._observer.known(copies[known])


@dataclass(frozen=True, slots=True)
class _Below:
    """A store, and the policy of its blocks."""

    store: NvmeStore
    policy: Policy
    is_known: Array  # whether the policy knows the block in each slot

    def take_over(self, slots: Array, source: Policy, theirs: Array) -> None:
        self.policy.copied(slots, source, theirs)
        self.is_known[slots] = True

    def rank(self, slots: Array) -> Array:
        ranks = self.policy.rank(slots, now=time.monotonic())
        unknown = ~self.is_known[slots]
        ranks[unknown] = _UNKNOWN
        ticks = self.store.tables.slot_tick[slots[unknown]]
        # In their own order, which is lost beside numbers that large.
        ranks[unknown] *= 1.0 - ticks / (2.0 * max(1, int(self.store.tables.counts.tick)))
        return ranks


def find_alike(tables: Tables, slots: Array, others: Tables) -> Array:
    """Return the slots in `others` of the blocks in `slots`, -1 where there is none."""
    found = key_index.find(others, tables.slot_key[slots], tables.slot_part[slots])
    return np.where(others.slot_state[found] == READY, found, -1)


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
    slots = tables.slots_in(READY)
    slots = slots[tables.slot_namespace[slots] == namespace]
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
