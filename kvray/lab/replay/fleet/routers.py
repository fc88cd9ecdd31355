"""The routers that are compared: three that users know, and kvray's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvray.lab.replay.fleet.plan import FleetPlan, Memory
from kvray.routing import Candidate, Choice, Load, Lru, choose, predict
from kvray.store.replay.trace import Trace

MATCH_MIN = 0.1
"""Share of a prompt that must match; the default of Ray's `PrefixCacheAffinityRouter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace, as a router sees it."""

    number: int
    ids: Sequence[int]
    num_tokens: int


class Router(Protocol):
    """Chooses a replica for each request."""

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return the replica; `queues` are the requests without a first token on each."""

    def done(self, request: int, replica: int, now: float) -> None:
        """Note the first token of a request."""


class RoundRobin:
    """Takes replicas in turns."""

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._num_replicas = plan.num_replicas

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return the next replica."""
        return request.number % self._num_replicas

    def done(self, request: int, replica: int, now: float) -> None:
        """Nothing to note."""


class PowerOfTwo:
    """Draws two replicas, and takes the one with the shorter queue, as Ray Serve does."""

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._random = random.Random(plan.seed)

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return one of two replicas."""
        drawn = self._random.sample(range(len(queues)), min(2, len(queues)))
        return min(drawn, key=queues.__getitem__)

    def done(self, request: int, replica: int, now: float) -> None:
        """Nothing to note."""


class Affinity:
    """Remembers which prefixes each replica got, by the rule of Ray's prefix-aware router.

    The replica with the longest match, if the queues are balanced; else the power of two choices.
    Without a match, the replica that remembers least. It forgets nothing, which is Ray's default.
    """

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._imbalance_max = plan.imbalance_max
        self._imbalanced = PowerOfTwo(plan, trace, memory)
        # Masks of the replicas that got each block.
        self._had = [0] * trace.num_unique
        self._num_had = [0] * plan.num_replicas

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return the replica with the shortest queue of those that match best."""
        if max(queues) - min(queues) > self._imbalance_max:
            replica = self._imbalanced.route(request, queues, now)
        else:
            replica = min(self._matching(request), key=queues.__getitem__)
        for block in request.ids:
            self._num_had[replica] += not self._had[block] >> replica & 1
            self._had[block] |= 1 << replica
        return replica

    def done(self, request: int, replica: int, now: float) -> None:
        """Nothing to note."""

    def _matching(self, request: Request) -> list[int]:
        matched, deepest = 0, 0
        for block in request.ids:
            if not self._had[block]:
                break
            matched, deepest = matched + 1, self._had[block]
        if matched < MATCH_MIN * len(request.ids) or not matched:
            least = min(self._num_had)
            return [at for at, count in enumerate(self._num_had) if count == least]
        return [at for at in range(len(self._num_had)) if deepest >> at & 1]


class Kvray:
    """Predicts the first token on each replica, from what the tier holds and how fast it comes."""

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._plan = plan
        self._block_tokens = trace.block_tokens
        self._memory = memory
        self._random = random.Random(plan.seed)
        self._loads = [Load() for _ in range(plan.num_replicas)]
        self._pools = [Lru[int](plan.pool_blocks) for _ in range(plan.num_replicas)]

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return the replica with the earliest first token."""
        choice = self.choose(request, now)
        replica = int(choice.replica)
        self._loads[replica].routed(request.number, choice.cost.work_s, now)
        self._pools[replica].use(request.ids)
        return replica

    def choose(self, request: Request, now: float) -> Choice:
        """Return the choice with all its costs, and note nothing."""
        stretches = self._memory.stretches(request.ids, request.num_tokens)
        costs = [
            predict(
                Candidate(
                    replica=str(at),
                    node=str(at),
                    rates=self._plan.rates,
                    queue_s=load.queue_s(now),
                    utilization=load.utilization(now),
                    pool_tokens=self._block_tokens * pool.leading(request.ids),
                ),
                request.num_tokens,
                stretches,
            )
            for at, (load, pool) in enumerate(zip(self._loads, self._pools, strict=True))
        ]
        return choose(costs, draws=[self._random.random() for _ in costs])

    def done(self, request: int, replica: int, now: float) -> None:
        """Take the request out of the replica's queue."""
        self._loads[replica].done(request, now)


ROUTERS: dict[str, Callable[[FleetPlan, Trace, Memory], Router]] = {
    "round_robin": RoundRobin,
    "pow2": PowerOfTwo,
    "affinity": Affinity,
    "kvray": Kvray,
}
