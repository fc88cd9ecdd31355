"""A replay with one tier, which is told at once of what happened to many requests.

What a request finds is known from what is there, what was stored since, and what has gone since.
So the tables and the policy need not follow until blocks are to be ranked, and then they follow for
all requests together. What has been used since blocks were ranked stays, and so do its ancestors,
which were used with it: the others may go in the order in which they were ranked, as if each
request had been finished before the next one came.

Requests are made in batches. Before each one, what came to the tier and left it is announced to the
index of a lookup, and the index is asked for all blocks of the batch: what it has a holder of is
what is found, but for what the batch itself changes, which no lookup could know yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from kvray.replay.announced import Announced
from kvray.replay.answers import Answers
from kvray.replay.forest import NOWHERE, Forest
from kvray.replay.tier import Tier
from kvray.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.policy import Use
from kvray.store.tables import Array

BATCH_REFS = 20_000
"""Blocks that the requests of a batch ask for: as many as a shard announces at a time."""

_NOTHING = np.empty(0, dtype=np.int64)


class OneTier:
    """A tier, and what was found in it of each request."""

    num_written = 0

    def __init__(self, trace: Trace, policy: str, num_blocks: int, keys: Array) -> None:
        """Start with an empty tier."""
        self.host_hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.disk_hits = np.zeros_like(self.host_hits)
        self._trace = trace
        self._keys = keys
        self._names = np.ascontiguousarray(keys[:, 0]).view(np.int64)
        self._starts = trace.starts.tolist()
        self._times = trace.times.tolist()
        self._answers = Answers(trace)
        self._policy = policies.POLICIES[policy](num_blocks)
        self._tier = Tier(num_blocks, self._policy)
        self._forest = Forest(trace, self._tier, keys)
        self._announced = Announced(self._tier.tables)
        self._num_free = num_blocks
        self._is_here = np.zeros(trace.num_unique, dtype=bool)
        # How often blocks were ranked, and how often before the last use of each.
        self._ranking = 0
        self._used_after = np.full(trace.num_unique, -1, dtype=np.int64)
        self._next: Array = _NOTHING
        # What the tier is still to be told: blocks that have gone, and of requests the blocks they
        # found and those that are there since.
        self._gone: list[Array] = []
        self._made: list[tuple[int, int, int]] = []

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
        assert len(self._announced) == np.count_nonzero(self._is_here), "nothing was forgotten"

    def settle(self) -> None:
        """Have the tier and its policy follow."""
        if self._gone:
            self._forest.evict(np.concatenate(self._gone))
            self._gone.clear()
        if self._made:
            self._store()
            self._note()
            self._made.clear()

    def _begin(self, first: int, stop: int) -> None:
        """Ask the index for the blocks of these requests."""
        self.settle()
        self._announced.announce()
        blocks = np.unique(self._trace.ids[self._starts[first] : self._starts[stop]])
        located = self._announced.locate(self._keys[blocks])
        assert (located == (self._forest.slots[blocks] != NOWHERE)).all(), "the shard says so too"
        self._is_here[blocks] = located

    def _make(self, request: int) -> None:
        """Look a request's blocks up, and store what is missing."""
        ids = self._trace.ids[self._starts[request] : self._starts[request + 1]]
        here = self._is_here.take(ids)
        hits = len(ids) if here.all() else int(here.argmin())
        self.host_hits[request] = hits
        self._used_after[ids] = self._ranking
        missing = len(ids) - hits - self._num_free
        if missing > 0:
            self._make_room(missing, request, ids[:hits])
        stop = min(len(ids), hits + self._num_free)
        self._num_free -= stop - hits
        self._is_here[ids[hits:stop]] = True
        self._made.append((request, hits, stop))

    def _make_room(self, count: int, request: int, found: Array) -> None:
        """Have `count` blocks go that are not `found`, or as many as there are."""
        count -= self._let_go(count)
        if count > 0:
            self.settle()
            now = self._times[request]
            self._tell_answers(now)
            self._next = self._forest.next_to_go(count, protect=found, now=now)
            self._ranking += 1
            self._used_after[found] = self._ranking
            self._let_go(count)

    def _let_go(self, count: int) -> int:
        """Have the next `count` blocks go, or as many as are ranked; return how many."""
        unused = self._next[self._used_after.take(self._next) != self._ranking]
        going, self._next = unused[:count], unused[count:]
        self._is_here[going] = False
        self._num_free += len(going)
        self._gone.append(going)
        return len(going)

    def _store(self) -> None:
        ids, starts = self._trace.ids, self._starts
        new = [ids[starts[one] + hits : starts[one] + stop] for one, hits, stop in self._made]
        dropped = self._forest.store(np.concatenate(new))
        if len(dropped):
            self._is_here[dropped] = False
            self._num_free += len(dropped)

    def _note(self) -> None:
        """Tell the policy of requests what they found, and what is there since."""
        first, last = self._made[0][0], self._made[-1][0]
        at = self._starts[first]
        ids = self._trace.ids[at : self._starts[last + 1]]
        slots, names = self._forest.slots.take(ids), self._names.take(ids)
        self._tier.touch(slots[slots != NOWHERE])
        policy = self._policy
        for request, hits, stop in self._made:
            now = self._times[request]
            self._tell_answers(now)
            start, end = self._starts[request] - at, self._starts[request + 1] - at
            middle, length = start + hits, end - start
            if hits:
                mine = slice(start, middle)
                policy.used(Use(slots[mine], names[mine], 0, length, now, request=request))
            if stop > hits:
                mine = slice(middle, start + stop)
                parent = int(slots[middle - 1]) if hits else NOWHERE
                policy.stored(Use(slots[mine], names[mine], hits, length, now, parent, request))
            self._answers.expect(request, now)

    def _tell_answers(self, now: float) -> None:
        for request, num_tokens in self._answers.until(now):
            self._policy.answered(request, num_tokens)
