"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.random import default_rng  # here, so that no replay pays for its import

from kvray.lab.replay.comparison import EVERYTHING
from kvray.lab.replay.results import Outcome
from kvray.lab.replay.tiers import Tiers
from kvray.lab.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.arena.tables import Array

POLICIES = tuple(policies.POLICIES)
ADMISSIONS = tuple(policies.ADMISSIONS)

_REQUESTS_PER_REPORT = 256


def simulate(
    trace: Trace,
    *,
    policy: str,
    host_blocks: int,
    nvme_blocks: int = 0,
    admission: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Return the outcome of a trace's requests on a tier.

    Args:
        trace: what is asked for.
        policy: one of `POLICIES`, of both tiers.
        host_blocks: size of the host tier.
        nvme_blocks: size of the NVMe tier; 0 for none.
        admission: one of `ADMISSIONS`, where there is an NVMe tier.
        progress: takes requests done and requests in all.
    """
    began_s = time.process_time()
    # Half empty, a tier neither evicts nor demotes: a larger one would find the same.
    enough = 2 * max(1, trace.num_unique)
    replay = Tiers(
        trace,
        policy,
        min(host_blocks, enough),
        keys_of(trace.num_unique),
        nvme_blocks=min(nvme_blocks, enough),
        admission=admission or EVERYTHING,
    )
    for request in replay.run():
        if request % _REQUESTS_PER_REPORT == 0:
            progress(request, trace.num_requests)
    progress(trace.num_requests, trace.num_requests)
    return Outcome.of(
        trace,
        replay.host_hits + replay.disk_hits,
        policy=policy,
        admission=admission,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        host_hit_blocks=int(replay.host_hits.sum()),
        nvme_hit_blocks=int(replay.disk_hits.sum()),
        nvme_written_blocks=replay.disk.num_written if replay.disk else 0,
        seconds=time.process_time() - began_s,
    )


def keys_of(num_blocks: int) -> Array:
    """Return a key for each block: u64 of shape [num_blocks, 4], as uniform as sha256's."""
    keys: Array = default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)
    return keys.astype("<u8", copy=False)
