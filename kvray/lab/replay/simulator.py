"""Replays a trace in virtual time through the parts of a tier that decide; no bytes are moved."""

from __future__ import annotations

import time

from kvray.lab.replay.announced import Announced
from kvray.lab.replay.comparison import EVERYTHING
from kvray.lab.replay.results import Outcome
from kvray.store import policy as policies
from kvray.store.replay import Replay, Trace

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
