"""What came of a trace on several replicas under one router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from kvray.routing import Cost
from kvray.store.replay.trace import Floats, Trace
from kvray.trace.arrival import Source


class Tally:
    """Takes what each request did, in any order."""

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        self.first_token_s: Floats = np.zeros(trace.num_requests)
        self.work_s: Floats = np.zeros(num_replicas)
        self.tokens: dict[str, int] = dict.fromkeys(("pool", *get_args(Source)), 0)

    def add(self, request: int, replica: int, first_token_s: float, cost: Cost) -> None:
        """Note a request's first token, and the work before it."""
        self.first_token_s[request] = first_token_s
        self.work_s[replica] += cost.work_s
        self.tokens["pool"] += cost.pool_tokens
        for bring in cost.brings:
            self.tokens[bring.source] += bring.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """One trace replayed through one router."""

    router: str
    reuse: float
    """Tokens that were not computed, over tokens of all prompts."""
    pool_reuse: float
    host_reuse: float
    disk_reuse: float
    remote_reuse: float
    first_token_p50_s: float
    first_token_p90_s: float
    in_time: float
    """Requests whose first token came before the deadline, over all requests."""
    goodput_per_s: float
    """Those requests, for each second."""
    throughput_per_s: float
    """All requests, for each second up to the last first token."""
    load_spread: float
    """The most work that a replica did, over the mean."""
    utilization: float
    """Work over the time that all replicas had."""
    reuse_of_one: float | None = None
    """Reuse over that of one replica with all the memory; None where that one has none."""
    seconds: float = 0.0
    """CPU time of the replay."""

    @classmethod
    def of(
        cls, trace: Trace, tally: Tally, *, router: str, deadline_s: float, end_s: float
    ) -> FleetOutcome:
        """Return the outcome of what was noted; the last first token came at `end_s`."""
        asked = max(1, trace.prompt_tokens)
        shares = {source: tokens / asked for source, tokens in tally.tokens.items()}
        p50, p90 = np.percentile(tally.first_token_s, (50, 90)).tolist()
        in_time = int((tally.first_token_s <= deadline_s).sum())
        mean_s, end_s = float(tally.work_s.mean()), max(end_s, 1e-9)
        return cls(
            router=router,
            reuse=sum(shares.values()),
            **{f"{source}_reuse": share for source, share in shares.items()},
            first_token_p50_s=p50,
            first_token_p90_s=p90,
            in_time=in_time / trace.num_requests,
            goodput_per_s=in_time / end_s,
            throughput_per_s=trace.num_requests / end_s,
            load_spread=float(tally.work_s.max()) / mean_s if mean_s else 1.0,
            utilization=mean_s / end_s,
        )
