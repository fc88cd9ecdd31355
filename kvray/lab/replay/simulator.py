"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved."""

from __future__ import annotations

import time

from kvray.lab.replay.comparison import EVERYTHING
from kvray.lab.replay.results import Outcome
from kvray.lab.replay.tiers import Tiers
from kvray.lab.replay.trace import Trace
from kvray.store import policy as policies

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
    replay = Tiers(
        trace,
        policy,
        min(host_blocks, enough),
        nvme_blocks=min(nvme_blocks, enough),
        admission=admission or EVERYTHING,
    )
    for _ in replay.run():
        pass
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
