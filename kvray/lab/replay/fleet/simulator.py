"""Replays a trace on several replicas, event by event, in virtual time; no bytes are moved.

Several routers are compared so, beside one replica with all the memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import get_args

import numpy as np

from kvray.lab.replay.fleet.plan import FleetPlan, Memory
from kvray.lab.replay.fleet.routers import ROUTERS, Request
from kvray.routing import Candidate, Cost, predict
from kvray.store.replay.trace import Floats, Trace
from kvray.trace.arrival import Source

ONE = "one replica"
"""The bound: a replica with the memory and the rate of all."""


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


def simulate(trace: Trace, plan: FleetPlan, *, router: str) -> FleetOutcome:
    """Return what comes of a trace with one of `ROUTERS`."""
    began_s = time.process_time()
    fleet = Fleet(trace, plan, router)
    end_s = fleet.run()
    outcome = FleetOutcome.of(
        trace, fleet.tally, router=router, deadline_s=plan.deadline_s, end_s=end_s
    )
    return replace(outcome, seconds=time.process_time() - began_s)


class Fleet:
    """Replicas that each bring and compute one prompt after the other, in the order of arrival."""

    def __init__(self, trace: Trace, plan: FleetPlan, router: str) -> None:
        self.tally = Tally(trace, plan.num_replicas)
        self._plan = plan
        self._arrivals = (trace.times / plan.speed).tolist()
        self._requests = _requests(trace)
        self._block_tokens = trace.block_tokens
        self._memory = Memory(trace, plan)
        self._router = ROUTERS[router](plan, trace, self._memory)
        self._waiting: list[deque[int]] = [deque() for _ in range(plan.num_replicas)]
        """The first one of each replica is being served."""
        # Time, replica and what the request that it serves did.
        self._ends: list[tuple[float, int, Cost]] = []

    def run(self) -> float:
        """Serve all requests; return when the last one had its first token."""
        now = 0.0
        for request, at in zip(self._requests, self._arrivals, strict=True):
            while self._ends and self._ends[0][0] <= at:
                self._finish()
            queues = [len(waiting) for waiting in self._waiting]
            replica = self._router.route(request, queues, at)
            self._waiting[replica].append(request.number)
            if len(self._waiting[replica]) == 1:
                self._begin(replica, at)
        while self._ends:
            now = self._finish()
        return now

    def _begin(self, replica: int, now: float) -> None:
        """Serve the next request of a replica: what is found now is what is reused."""
        request = self._requests[self._waiting[replica][0]]
        candidate = Candidate(
            replica=str(replica),
            node=str(replica),
            rates=self._plan.rates,
            queue_s=0.0,
            utilization=0.0,
            pool_tokens=self._block_tokens * self._memory.pools[replica].leading(request.ids),
        )
        stretches = self._memory.stretches(request.ids, request.num_tokens)
        cost = predict(candidate, request.num_tokens, stretches)
        heappush(self._ends, (now + cost.work_s, replica, cost))

    def _finish(self) -> float:
        """Give the next first token, and begin with what waits there; return the time."""
        now, replica, cost = heappop(self._ends)
        number = self._waiting[replica].popleft()
        self.tally.add(number, replica, now - self._arrivals[number], cost)
        self._memory.use(replica, self._requests[number].ids)
        self._router.done(number, replica, now)
        if self._waiting[replica]:
            self._begin(replica, now)
        return now


def _requests(trace: Trace) -> list[Request]:
    ids, starts, num_tokens = trace.ids.tolist(), trace.starts.tolist(), trace.num_tokens.tolist()
    return [
        Request(number=at, ids=ids[starts[at] : starts[at + 1]], num_tokens=num_tokens[at])
        for at in range(trace.num_requests)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """The outcomes of all routers, and the bound."""

    trace: Trace
    plan: FleetPlan
    one: FleetOutcome
    outcomes: Sequence[FleetOutcome]


def compare_routers(
    trace: Trace,
    plan: FleetPlan,
    routers: Sequence[str],
    *,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> FleetComparison:
    """Replay a trace through each router.

    `progress` takes the name of the next run, and how many runs are done and in all.
    """
    total = 1 + len(routers)
    progress(ONE, 0, total)
    one = replace(simulate(trace, plan.merged(), router="round_robin"), router=ONE)
    outcomes = []
    for done, router in enumerate(routers, start=1):
        progress(router, done, total)
        found = simulate(trace, plan, router=router)
        share = found.reuse / one.reuse if one.reuse else None
        outcomes.append(replace(found, reuse_of_one=share))
    return FleetComparison(trace=trace, plan=plan, one=one, outcomes=outcomes)
