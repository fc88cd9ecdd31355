"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.random import default_rng  # here, so that no replay pays for its import

from kvray.replay.results import Outcome
from kvray.replay.tiers import Tiers
from kvray.replay.trace import Trace
from kvray.store import policy as policies
from kvray.store.tables import Array

POLICIES = tuple(policies.POLICIES)
ADMISSIONS = tuple(policies.ADMISSIONS)

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
    keys = keys_of(trace.num_unique)
    replay = Tiers(
        trace,
        policy,
        host_blocks,
        keys,
        nvme_blocks=nvme_blocks,
        admission=admission or ADMISSIONS[0],
    )
    for request in replay.run():
        if request % _REPORT == 0:
            progress(request, trace.num_requests)
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
        nvme_written_blocks=replay.num_written,
        seconds=time.process_time() - began_s,
    )


def keys_of(num_blocks: int) -> Array:
    """Return a key for each block: u64 of shape [num_blocks, 4], as uniform as sha256's."""
    keys: Array = default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)
    return keys.astype("<u8", copy=False)
