"""Candidates and costs with the figures that a test does not care about."""

from typing import Any

from kvray.routing import Candidate, Cost, Link, Rates

RATES = Rates(
    prefill_tokens_per_s=1000.0,
    token_bytes=100.0,
    host=Link(bytes_per_s=1e6),
    remote=Link(latency_s=0.01, bytes_per_s=4e5),
    disk=Link(bytes_per_s=2e5),
)
"""A token is computed in 1 ms; it comes from memory in 0.1 ms, from a disk in 0.6, from another
node in 0.35 and 10 ms more."""


def candidate(replica: str = "a", **fields: Any) -> Candidate:
    """Return an idle replica without blocks, on a node of the same name."""
    known = {"node": replica, "rates": RATES, "queue_s": 0.0, "utilization": 0.0, "pool_tokens": 0}
    return Candidate(replica=replica, **known | fields)


def cost(replica: str, *, work_s: float, queue_s: float = 0.0, utilization: float = 0.0) -> Cost:
    """Return the cost of a prompt that is computed in `work_s`."""
    return Cost(
        replica=replica,
        pool_tokens=0,
        brings=(),
        computed_tokens=round(1000 * work_s),
        queue_s=queue_s,
        compute_s=work_s,
        utilization=utilization,
    )
