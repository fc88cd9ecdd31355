"""A replay with a disk below the host tier, one request after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvray.replay.answers import Answers
from kvray.replay.disk import Disk
from kvray.replay.tier import Tier
from kvray.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.policy import Admission, Policy, Use
from kvray.store.slots import Reservation
from kvray.store.tables import Array


class TwoTiers:
    """A host tier and a disk, and what was found in each of every request."""

    def __init__(
        self, trace: Trace, policy: str, sizes: tuple[int, int], admission: str, keys: Array
    ) -> None:
        """Start with both empty; `sizes` are the host tier's and the disk's, in blocks."""
        self._trace = trace
        self._keys = keys
        self._names = np.ascontiguousarray(keys[:, 0]).view(np.int64)
        self._starts = trace.starts.tolist()
        self._times = trace.times.tolist()
        self._answers = Answers(trace)
        host_blocks, nvme_blocks = sizes
        host = self._host = Tier(host_blocks, policies.POLICIES[policy](host_blocks))
        admitting = policies.ADMISSIONS[admission](host_blocks, host.policy)
        self._observers: tuple[Policy | Admission, ...] = (host.policy, admitting)
        self.disk = Disk(nvme_blocks, host, admitting)
        self.host_hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.disk_hits = np.zeros(trace.num_requests, dtype=np.int64)

    @property
    def num_written(self) -> int:
        """Blocks that were written to the disk."""
        return self.disk.num_written

    def run(self) -> Iterator[int]:
        """Make all requests; yield the number of each before it is made."""
        for request in range(self._trace.num_requests):
            yield request
            self.make(request)

    def make(self, request: int) -> None:
        """Look a request's blocks up, promote what is on disk, store what is nowhere."""
        now = self._times[request]
        for answered, num_tokens in self._answers.until(now):
            for one in self._observers:
                one.answered(answered, num_tokens)
        ids = self._trace.ids[self._starts[request] : self._starts[request + 1]]
        keys, names = self._keys[ids], self._names[ids]
        found = self._host.find(keys)
        self.host_hits[request] = len(found)
        self._host.touch(found)
        found, stop = self._promote(request, keys, found, now)
        if stop:
            use = Use(found[:stop], names[:stop], 0, len(ids), now, request=request)
            for one in self._observers:
                one.used(use)
            self.disk.used(found[:stop])
        self._stored(request, names, found[stop:], np.arange(stop, len(found)), now)
        if len(found) < len(ids):
            self._store(request, keys, names, found, now)
        self._answers.expect(request, now)

    def _promote(self, request: int, keys: Array, found: Array, now: float) -> tuple[Array, int]:
        """Bring what is on disk after the blocks found.

        Returns:
            The slots of all, and how many of them come with what was known of them.
        """
        first = len(found)
        on_disk = self.disk.find(keys[first:])
        if not len(on_disk):
            return found, first
        self.disk_hits[request] = len(on_disk)
        self.disk.tier.touch(on_disk)
        made = self._fill(keys[first : first + len(on_disk)], keys, found, now)
        # Making room may have had the last of them leave the disk.
        slots = self.disk.tier.find_any(keys[first:][made.rows])
        here = slots >= 0
        self.disk.promoted(slots[here], made.slots[here])
        return self._host.find(keys[: first + len(on_disk)]), first + int(here.sum())

    def _store(self, request: int, keys: Array, names: Array, found: Array, now: float) -> None:
        first = len(found)
        made = self._fill(keys[first:], keys, found, now)
        self._stored(request, names, made.slots, first + made.rows, now)

    def _stored(self, request: int, names: Array, slots: Array, rows: Array, now: float) -> None:
        """Tell of blocks that are new to the host tier: these rows of a request's."""
        if len(slots):
            parent = int(self._host.tables.slot_parent[slots[0]])
            use = Use(slots, names[rows], int(rows[0]), len(names), now, parent, request)
            for one in self._observers:
                one.stored(use)

    def _fill(self, wanted: Array, keys: Array, found: Array, now: float) -> Reservation:
        """Make room for `wanted`, which follow the blocks found of `keys`, and store them."""
        victims = self._host.victims(len(wanted), protect=found, now=now)
        if len(victims):
            self.disk.demote(victims, now=now)
        self._host.evict(victims)
        parent = keys[len(found) - 1 : len(found)] if len(found) else None
        made = self._host.store(wanted, parent=parent, depth=len(found))
        self.disk.stored(made.slots)
        return made
