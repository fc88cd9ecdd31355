"""A replay through one tier or two, whose tables and policies follow for many requests at once.

Requests are made in batches. Before each one, the tiers announce to the index of a lookup which
blocks came and left, and the index is asked for all blocks of the batch. It decides what is found,
except for what the batch itself changes, which no lookup could know yet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.random import default_rng  # here, so that no replay pays for its import

from kvray.lab.replay.announced import Announced
from kvray.lab.replay.disk import Disk
from kvray.lab.replay.level import NOWHERE, Level, names_of
from kvray.lab.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.arena.tables import Array
from kvray.store.policy import Admission, Policy, Use

BATCH_REFS = 20_000
"""Blocks that the requests of a batch ask for: as many as a shard announces at a time."""
_ANSWER_TOKENS_PER_S = 50.0
"""A trace does not say when answers end: they are given at this speed."""


class Tiers:
    """A host tier, perhaps a disk below it, and the hits of every request in each."""

    def __init__(
        self,
        trace: Trace,
        policy: str,
        host_blocks: int,
        *,
        nvme_blocks: int = 0,
        admission: str = "all",
    ) -> None:
        """Start with both empty; without `nvme_blocks` there is no disk."""
        self.host_hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.disk_hits = np.zeros_like(self.host_hits)
        self._trace = trace
        self.keys = keys = keys_of(trace.num_unique)
        self._names = names_of(keys)
        self._starts, self._times = trace.starts.tolist(), trace.times.tolist()
        ranking = policies.POLICIES[policy](host_blocks)
        self.host = Level(trace, ranking, host_blocks, keys, settle=self.settle)
        self.disk: Disk | None = None
        self._observers: tuple[Policy | Admission, ...] = (ranking,)
        self._levels = [self.host]
        if nvme_blocks:
            admitting = policies.ADMISSIONS[admission](host_blocks, ranking)
            self.disk = Disk(trace, self.host, nvme_blocks, admitting, keys, settle=self.settle)
            self._observers += (admitting,)
            self._levels.append(self.disk.level)
        self._announced = Announced([level.tier.tables for level in self._levels])
        # Requests that the tiers do not know yet: how many of their blocks were in the host tier,
        # how many in one of the two, and how many are in the host tier since.
        self._made: list[tuple[int, int, int, int]] = []
        # A heap of the answers that are not known yet: when they will be, and their requests.
        self._answers: list[tuple[float, int]] = []

    def run(self) -> Iterator[int]:
        """Make all requests; yield the number of each before it is made."""
        first = 0
        while first < self._trace.num_requests:
            stop = max(first + 1, bisect_right(self._starts, self._starts[first] + BATCH_REFS) - 1)
            self._begin(first, stop)
            for request in range(first, stop):
                yield request
                self._make(request)
            first = stop
        self.settle()
        self._announced.announce()
        here = np.any([level.is_here for level in self._levels], axis=0)
        assert len(self._announced) == np.count_nonzero(here), "nothing was forgotten"

    def settle(self, now: float | None = None) -> None:
        """Let the tiers and policies follow; they learn the answers that are known `now`."""
        if self.disk is not None:
            self.disk.follow()
        self.host.follow()
        if self._made:
            self._store()
            self._note()
            self._made.clear()
        if now is not None:
            self._tell_answers(now)

    def _begin(self, first: int, stop: int) -> None:
        """Ask the index for the blocks of these requests."""
        self.settle()
        self._announced.announce()
        blocks = np.unique(self._trace.ids[self._starts[first] : self._starts[stop]])
        located = self._announced.locate(self.keys[blocks])
        for level, mask in zip(self._levels, located, strict=True):
            assert (mask == (level.slots[blocks] != NOWHERE)).all(), "the shard says so too"
            level.is_here[blocks] = mask

    def _make(self, request: int) -> None:
        """Look a request's blocks up, promote those on disk, and store those that are nowhere."""
        host, ids = self.host, self._trace.ids[self._starts[request] : self._starts[request + 1]]
        hits = found = _leading(host.is_here.take(ids))
        host.use(ids)
        if self.disk is not None:
            below = self.disk.level
            found += _leading(below.is_here.take(ids[hits:]))
            self.disk.needed = ids[hits:found]
            below.use(ids[:found])
            self.disk_hits[request] = found - hits
        self.host_hits[request] = hits
        missing = len(ids) - hits - host.num_free
        if missing > 0:
            host.make_room(missing, protect=ids[:hits], now=self._times[request])
        stop = min(len(ids), hits + host.num_free)
        host.enter(ids[hits:stop])
        self._made.append((request, hits, min(found, stop), stop))

    def _store(self) -> None:
        """Store the blocks that requests brought, and tell the policy of those on disk."""
        ids, starts = self._trace.ids, self._starts
        new = [ids[starts[one] + hits : starts[one] + stop] for one, hits, _, stop in self._made]
        self.host.store(np.concatenate(new))
        if self.disk is not None:
            parts = [ids[starts[one] + hits : starts[one] + at] for one, hits, at, _ in self._made]
            self.disk.promoted(np.concatenate(parts))

    def _note(self) -> None:
        """Tell the policies which blocks each request found, and which came with it."""
        first, last = self._made[0][0], self._made[-1][0]
        at = self._starts[first]
        ids = self._trace.ids[at : self._starts[last + 1]]
        slots, names = self.host.slots.take(ids), self._names.take(ids)
        for request, _, found, stop in self._made:
            now = self._times[request]
            self._tell_answers(now)
            start, end = self._starts[request] - at, self._starts[request + 1] - at
            middle, length = start + found, end - start
            if found:
                mine = slice(start, middle)
                use = Use(slots[mine], names[mine], 0, length, now, request=request)
                for one in self._observers:
                    one.used(use)
                if self.disk is not None:
                    self.disk.used(ids[mine])
            if stop > found:
                mine = slice(middle, start + stop)
                parent = int(slots[middle - 1]) if found else NOWHERE
                use = Use(slots[mine], names[mine], found, length, now, parent, request)
                for one in self._observers:
                    one.stored(use)
            if num_tokens := self._trace.num_answer_tokens[request]:
                heapq.heappush(self._answers, (now + num_tokens / _ANSWER_TOKENS_PER_S, request))

    def _tell_answers(self, now: float) -> None:
        while self._answers and self._answers[0][0] <= now:
            request = heapq.heappop(self._answers)[1]
            for one in self._observers:
                one.answered(request, int(self._trace.num_answer_tokens[request]))


def keys_of(num_blocks: int) -> Array:
    """Return a key for each block: u64 of shape [num_blocks, 4], as uniform as sha256's."""
    keys: Array = default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)
    return keys.astype("<u8", copy=False)


def _leading(mask: Array) -> int:
    """Return how many of the first ones are set, one after the other."""
    return len(mask) if mask.all() else int(mask.argmin())
