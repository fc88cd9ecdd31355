"""Replays a trace on several replicas, event by event, in virtual time; no bytes are moved."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from heapq import heappop, heappush

from kvray.lab.replay.fleet.memory import Memory
from kvray.lab.replay.fleet.plan import FleetPlan
from kvray.lab.replay.fleet.results import FleetOutcome, Tally
from kvray.lab.replay.fleet.routers import ROUTERS, Request
from kvray.routing import Candidate, Cost, predict
from kvray.store.replay.trace import Trace


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
