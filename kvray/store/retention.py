"""Decides which blocks of a node stay, by policies that follow its events. Thread-safe."""

import threading
import time
from dataclasses import dataclass

import numpy as np

from kvray.store.arena import key_index, slabs
from kvray.store.arena.arena import Arena
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import NO_SLOTS, READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.duplicates import DuplicateBlocks, Question
from kvray.store.nvme.store import NvmeStore
from kvray.store.policy import ADMISSIONS, POLICIES, Policy
from kvray.store.policy.observer import Observer
from kvray.store.use_counts import UseCounts

_UNKNOWN = -1e30
"""Rank of blocks with nothing known but the last use: below all others."""
_DUPLICATE = -1e30
"""Rank of blocks that another node keeps, likewise."""
_NEW = 1e30
"""Rank of blocks that have come since the last look: above all others."""
_GOING_SHARE = 1 / 8
"""Share of a size's blocks that counts as going next: much used ones are not among them."""
_GOING_MAX = 4096


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
        self._duplicates = DuplicateBlocks(num_slots)
        self.uses = UseCounts(num_slots)
        """Of the arena's blocks, for people; read without the lock."""

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
        """Learn from the events in the arena since the last call."""
        with self._lock:
            now = time.monotonic()
            used = self._observer.observe(self._policy, self._admission, now=now)
            self.uses.note(self._arena.tables, used, now=now)
            if self._below is not None and len(used):
                # A use above counts below as well.
                slots = find_alike(self._arena.tables, used, self._below.store.tables)
                both = slots >= 0
                self._below.take_over(slots[both], self._policy, used[both])
                self._below.store.touch(slots[both])

    def rank(self, slots: Array) -> Array:
        """Return a number for each of `slots` of the arena, f8: the lowest goes first."""
        ranks = self._rank_alone(slots)
        mask = self.are_duplicates(slots)
        if mask.any():
            # Below all others, and among themselves as they were.
            different, order = np.unique(ranks[mask], return_inverse=True)
            ranks[mask] = _DUPLICATE * (2.0 - order / len(different))
        # Blocks that were given up go before all others.
        ranks[self._arena.tables.slot_tick[slots] == 0] = -np.inf
        return ranks

    def admits(self, slots: Array) -> Array:
        """Return a mask of the arena's blocks that are worth their write to the tier below.

        A duplicate is not: the node that keeps it will write it.
        """
        admitted = ~self.are_duplicates(slots)
        names = self._arena.tables.slot_key[slots[admitted], 0].view(np.int64)
        with self._lock:
            admitted[admitted] = self._admission.admits(
                slots[admitted], names, now=time.monotonic()
            )
        return admitted

    # -- what other nodes keep ----------------------------------------------------------------

    def ask(self, free_share: float) -> Question:
        """Return blocks that go next and that no recent question was about.

        For one thread at a time. While more than `free_share` of a size's blocks is free, nothing
        of that size goes soon.
        """
        tables = self._arena.tables
        going = [NO_SLOTS]
        for size in slabs.block_sizes(tables):
            if _has_less(tables, size, free_share):
                within = slabs.slots_of(tables, size)
                count = min(int(_GOING_SHARE * len(within)), _GOING_MAX)
                going.append(choose_victims(tables, count, within=within, rank=self._rank_alone))
        # If there are several sizes, some of each.
        most = _GOING_MAX // max(1, len(going) - 1)
        slots = np.concatenate([some[:most] for some in going])
        # Without our lock: what is noted of questions is for who asks only.
        return self._duplicates.ask(tables, slots, now=time.monotonic())

    def answer(self, question: Question, mask: Array) -> None:
        """Note which of the blocks in question are duplicates, as a mask."""
        with self._lock:
            self._duplicates.note(question, mask, now=time.monotonic())

    def are_duplicates(self, slots: Array) -> Array:
        """Return a mask of `slots`: blocks that another node is known to keep."""
        with self._lock:
            return self._duplicates.among(self._arena.tables, slots, now=time.monotonic())

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
                self._below.policy.freed(slots)
                self._below.is_known[slots] = False

    def promoted(self, copies: Array, slots: Array) -> None:
        """Note that the arena's slots `copies` have the blocks of the store's `slots`."""
        with self._lock:
            if self._below is not None:
                known = self._below.is_known[slots]
                self._policy.copied(copies[known], self._below.policy, slots[known])
                self._observer.known(copies[known])

    def _rank_alone(self, slots: Array) -> Array:
        with self._lock:
            ranks = self._policy.rank(slots, now=time.monotonic())
            # The policy would take them for the blocks that were in their slots before.
            ranks[~self._observer.has_seen(slots)] = _NEW
        return ranks


@dataclass(frozen=True, slots=True)
class _Below:
    """A store, and the policy of its blocks."""

    store: NvmeStore
    policy: Policy
    is_known: Array
    """Whether the policy knows the block in each slot."""

    def take_over(self, slots: Array, source: Policy, theirs: Array) -> None:
        self.policy.copied(slots, source, theirs)
        self.is_known[slots] = True

    def rank(self, slots: Array) -> Array:
        ranks = self.policy.rank(slots, now=time.monotonic())
        unknown = ~self.is_known[slots]
        ranks[unknown] = _UNKNOWN
        ticks = self.store.tables.slot_tick[slots[unknown]]
        # In their own order, which is lost beside numbers that large.
        ranks[unknown] *= 1.0 - ticks / (2.0 * max(1, int(self.store.tables.tick)))
        return ranks


def find_alike(tables: Tables, slots: Array, others: Tables) -> Array:
    """Return the slots in `others` of the blocks in `slots`, -1 where there is none."""
    found = key_index.find(others, tables.slot_key[slots], tables.slot_part[slots])
    return np.where(others.slot_state[found] == READY, found, -1)


def _has_less(tables: Tables, block_bytes: int, free_share: float) -> bool:
    """Return whether less than a share of all possible blocks of a size has room."""
    most = slabs.num_possible(tables, block_bytes)
    return slabs.num_available(tables, block_bytes) < free_share * most
