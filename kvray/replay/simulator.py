"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from kvray.replay.disk import Disk
from kvray.replay.results import Outcome
from kvray.replay.tier import Tier
from kvray.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.policy import Admission, Policy, Use
from kvray.store.slots import Reservation
from kvray.store.tables import Array

POLICIES = tuple(policies.POLICIES)
ADMISSIONS = tuple(policies.ADMISSIONS)

_ANSWER_TOKENS_PER_S = 50.0
"""An answer is known when it has been given, at this speed."""
_REPORT = 256
"""Requests from one report to the next."""


def simulate(
    trace: Trace,
    *,
    policy: str,
    host_blocks: int,
    nvme_blocks: int = 0,
    admission: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Return what a tier would have found of a trace's requests.

    Args:
        trace: what is asked for.
        policy: one of `POLICIES`, of both tiers.
        host_blocks: size of the host tier.
        nvme_blocks: size of the NVMe tier; 0 for none.
        admission: one of `ADMISSIONS`, where there is an NVMe tier.
        progress: called with requests done and requests in all.
    """
    began_s = time.process_time()
    replay = _Replay(trace, policy, host_blocks, nvme_blocks, admission or ADMISSIONS[0])
    for request in range(trace.num_requests):
        if request % _REPORT == 0:
            progress(request, trace.num_requests)
        replay.make(request)
    progress(trace.num_requests, trace.num_requests)
    host_hits, disk_hits = replay.host_hits, replay.disk_hits
    return Outcome(
        policy=policy,
        admission=admission,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        requests=trace.num_requests,
        refs=trace.num_refs,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=int(host_hits.sum() + disk_hits.sum()),
        hit_tokens=trace.hit_tokens(host_hits + disk_hits),
        host_hit_blocks=int(host_hits.sum()),
        nvme_hit_blocks=int(disk_hits.sum()),
        nvme_written_blocks=0 if replay.disk is None else replay.disk.num_written,
        seconds=time.process_time() - began_s,
    )


class _Replay:
    """The tiers, and what was found in them of each request."""

    def __init__(
        self, trace: Trace, policy: str, host_blocks: int, nvme_blocks: int, admission: str
    ) -> None:
        self._trace = trace
        self._keys = _keys_of(trace.num_unique)
        self._names = np.ascontiguousarray(self._keys[:, 0]).view(np.int64)
        self._starts = trace.starts.tolist()
        self._times = trace.times.tolist()
        self._answers = _Answers(trace)
        self._host = Tier(host_blocks, policies.POLICIES[policy](host_blocks))
        self._admission: Admission | None = None
        self.disk: Disk | None = None
        if nvme_blocks:
            admitting = policies.ADMISSIONS[admission](host_blocks, self._host.policy)
            self._admission = admitting
            self.disk = Disk(nvme_blocks, self._host, admitting)
        self.host_hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.disk_hits = np.zeros(trace.num_requests, dtype=np.int64)

    def make(self, request: int) -> None:
        """Look a request's blocks up, promote what is on disk, store what is nowhere."""
        now = self._times[request]
        for answered, num_tokens in self._answers.until(now):
            for one in self._observers():
                one.answered(answered, num_tokens)
        ids = self._trace.ids[self._starts[request] : self._starts[request + 1]]
        keys, names = self._keys[ids], self._names[ids]
        found = self._host.find(keys)
        self.host_hits[request] = len(found)
        self._host.touch(found)
        stop = len(found)
        if self.disk is not None:
            found, stop = self._promote(request, keys, found, now)
        if stop:
            use = Use(found[:stop], names[:stop], 0, len(ids), now, request=request)
            for one in self._observers():
                one.used(use)
            if self.disk is not None:
                self.disk.used(found[:stop])
        self._stored(request, names, found[stop:], np.arange(stop, len(found)), now)
        if len(found) < len(ids):
            self._store(request, keys, names, found, now)
        self._answers.expect(request, now)

    def _observers(self) -> tuple[Policy | Admission, ...]:
        one = self._host.policy
        return (one,) if self._admission is None else (one, self._admission)

    def _promote(self, request: int, keys: Array, found: Array, now: float) -> tuple[Array, int]:
        """Bring what is on disk after the blocks found.

        Returns:
            The slots of all, and how many of them come with what was known of them.
        """
        assert self.disk is not None, "it is asked"
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
            for one in self._observers():
                one.stored(use)

    def _fill(self, wanted: Array, keys: Array, found: Array, now: float) -> Reservation:
        """Make room for `wanted`, which follow the blocks found of `keys`, and store them."""
        victims = self._host.victims(len(wanted), protect=found, now=now)
        if self.disk is not None and len(victims):
            self.disk.demote(victims, now=now)
        self._host.evict(victims)
        parent = keys[len(found) - 1 : len(found)] if len(found) else None
        made = self._host.store(wanted, parent=parent, depth=len(found))
        if self.disk is not None:
            self.disk.stored(made.slots)
        return made


class _Answers:
    """When the answers to requests will be known."""

    def __init__(self, trace: Trace) -> None:
        self._num_tokens = trace.num_answer_tokens.tolist()
        self._due: list[tuple[float, int]] = []

    def expect(self, request: int, now: float) -> None:
        """Have the answer to a request that is made now known when it has been given."""
        if self._num_tokens[request]:
            due = now + self._num_tokens[request] / _ANSWER_TOKENS_PER_S
            heapq.heappush(self._due, (due, request))

    def until(self, now: float) -> list[tuple[int, int]]:
        """Return the requests whose answers are known since the last call, and their tokens."""
        known = []
        while self._due and self._due[0][0] <= now:
            request = heapq.heappop(self._due)[1]
            known.append((request, self._num_tokens[request]))
        return known


def _keys_of(num_blocks: int) -> Array:
    """Return a key for each block: u64 of shape [num_blocks, 4], as uniform as sha256's."""
    keys: Array = np.random.default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)
    return keys.astype("<u8", copy=False)
