"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved.

A lookup's index knows the content of tiers as announced, a batch at a time.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.random import default_rng

from kvray.index import Index
from kvray.lab.replay.comparison import EVERYTHING, Outcome
from kvray.store import policy as policies
from kvray.store.arena.tables import Array
from kvray.store.replay import Replay, Trace
from kvray.store.replay.replay import NOWHERE

BATCH_REFS = 20_000
"""Blocks that requests ask for between two announcements: as many as a shard makes at a time."""


class Announced:
    """The index of a lookup, to which each tier announces its blocks as a shard would."""

    def __init__(self, replay: Replay, trace: Trace) -> None:
        num_blocks = trace.num_unique
        self._index = Index()
        self._trace = trace
        self._next = 0  # the request before which the tiers announce again
        self._tiers = (replay.host, replay.disk)
        self._known = np.zeros((len(self._tiers), num_blocks), dtype=bool)
        # As uniform as sha256's.
        self._keys = default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)

    def before(self, request: int) -> None:
        """Announce, if it is time, before a request is made."""
        if request == self._next:
            starts = self._trace.starts
            beyond = np.searchsorted(starts, starts[request] + BATCH_REFS, side="right")
            self._next = max(request + 1, int(beyond) - 1)
            self._announce(self._trace.ids[starts[request] : starts[self._next]])

    def at_end(self) -> None:
        """Announce what the last requests left."""
        self._announce(self._trace.ids[:0])

    def _announce(self, asked_next: Array) -> None:
        """Tell the index what came and left; it must find of the blocks what the tiers have."""
        for at, tier in enumerate(self._tiers):
            is_here = tier.slots != NOWHERE
            has_changed = is_here != self._known[at]
            removed, added = self._keys[has_changed & ~is_here], self._keys[has_changed & is_here]
            self._index.remove(str(at), removed.tobytes(), [0] * len(removed))
            self._index.add(str(at), added.tobytes(), [0] * len(added))
            self._known[at] = is_here
        assert len(self._index) == np.count_nonzero(self._known.any(axis=0)), "nothing is forgotten"
        blocks = np.unique(asked_next)
        found = np.zeros((len(self._tiers), len(blocks)), dtype=bool)
        start = 0
        for run in self._index.locate(self._keys[blocks].tobytes()):
            found[:, start : run.stop] = [[str(at) in run.holders] for at in range(len(found))]
            start = run.stop
        assert (found == self._known[:, blocks]).all(), "the index says so too"


POLICIES = tuple(policies.POLICIES)
ADMISSIONS = tuple(policies.ADMISSIONS)


def simulate(
    trace: Trace,
    *,
    policy: str,
    host_blocks: int,
    nvme_blocks: int = 0,
    admission: str | None = None,
) -> Outcome:
    """Return the outcome of a trace's requests on a host tier, and an NVMe tier if it has blocks.

    `policy` is one of `POLICIES`, of both tiers. `admission`, one of `ADMISSIONS`, decides which
    blocks the NVMe tier takes.
    """
    began_s = time.process_time()
    # Half empty, a tier neither evicts nor demotes: a larger one would find the same.
    enough = 2 * max(1, trace.num_unique)
    sizes = min(host_blocks, enough), min(nvme_blocks, enough)
    replay = Replay(trace, policy, *sizes, admission=admission or EVERYTHING)
    announced = Announced(replay, trace)
    for request in replay.run():
        announced.before(request)
    announced.at_end()
    return Outcome.of(
        trace,
        replay.host_hits + replay.disk_hits,
        policy=policy,
        admission=admission,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        host_hit_blocks=int(replay.host_hits.sum()),
        nvme_hit_blocks=int(replay.disk_hits.sum()),
        nvme_written_blocks=replay.num_written,
        seconds=time.process_time() - began_s,
    )
