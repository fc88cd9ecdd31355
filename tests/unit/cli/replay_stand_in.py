"""`kvray replay` with a stand-in for the simulator, so that its output can be told beforehand."""

import time

from kvray.lab.replay import Outcome, Trace
from tests.unit.lab.replay.excerpts import lru_hits


def simulate(
    trace: Trace,
    *,
    policy: str,
    host_blocks: int,
    nvme_blocks: int = 0,
    admission: str | None = None,
) -> Outcome:
    """Replay LRU, or LRU with twice the blocks; `half` writes half of what is missed."""
    if policy == "slow":
        print("slow begins", flush=True)
        time.sleep(60)
    host_blocks_used = host_blocks * (2 if policy == "double" else 1)
    host_hits = sum(lru_hits(trace, host_blocks_used))
    hits = sum(lru_hits(trace, host_blocks_used + nvme_blocks))
    missed = trace.num_refs - host_hits
    return Outcome(
        policy=policy,
        admission=admission,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        refs=trace.num_refs,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=hits,
        hit_tokens=hits * trace.block_tokens,
        host_hit_blocks=host_hits,
        nvme_hit_blocks=hits - host_hits,
        nvme_written_blocks=(missed // 2 if admission == "half" else missed) if nvme_blocks else 0,
        seconds=0.5,
    )


if __name__ == "__main__":
    import sys

    from kvray.cli import main
    from kvray.lab.replay import simulator

    simulator.simulate = simulate
    simulator.POLICIES, simulator.ADMISSIONS = ("lru", "double"), ("all", "half")
    if "--slow" in sys.argv:
        sys.argv.remove("--slow")
        simulator.POLICIES = ("lru", "slow")
    main()
