"""A trace on several replicas behind a router, event by event in virtual time, without bytes."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby
from typing import Protocol, get_args

import numpy as np

from kvray.routing import Candidate, Cost, Link, Load, Lru, Rates, Stretch, choose, predict
from kvray.routing.cost import Medium
from kvray.store.replay import Floats, Trace
from kvray.trace.arrival import Source

ONE = "one replica"
"""The bound: a replica with the memory and the rate of all."""
MATCH_MIN = 0.1
"""Share of a prompt that must match; the default of Ray's `PrefixCacheAffinityRouter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Equal replicas, each on a node of its own, and the load that they get."""

    num_replicas: int
    pool_blocks: int
    host_blocks: int
    disk_blocks: int = 0
    """Of each node's disk; 0: there is none."""
    rates: Rates
    speed: float = 1.0
    deadline_s: float = 5.0
    """First tokens after it are no goodput."""
    seed: int = 0
    imbalance_max: int = 10
    """Difference of queue lengths above which `affinity` falls back to `pow2`."""
    num_ingresses: int = 1
    """Routers that take requests in turns."""

    def merged(self) -> FleetPlan:
        """Return the plan of one replica with the memory and the prefill rate of all."""
        count, rates = self.num_replicas, self.rates

        def all_of(link: Link) -> Link:
            return replace(link, bytes_per_s=count * link.bytes_per_s)

        return replace(
            self,
            num_replicas=1,
            pool_blocks=count * self.pool_blocks,
            host_blocks=count * self.host_blocks,
            disk_blocks=count * self.disk_blocks,
            rates=replace(
                rates,
                prefill_tokens_per_s=count * rates.prefill_tokens_per_s,
                host=all_of(rates.host),
                disk=None if rates.disk is None else all_of(rates.disk),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace, as a router sees it."""

    number: int
    ids: Sequence[int]
    num_tokens: int


class Memory:
    """The pools of all replicas, their nodes' parts of the tier, and the index of the tier."""

    def __init__(self, trace: Trace, plan: FleetPlan) -> None:
        count = plan.num_replicas
        self.pools = [Lru[int](plan.pool_blocks) for _ in range(count)]
        self._hosts = [Lru[int](plan.host_blocks) for _ in range(count)]
        self._disks = [Lru[int](plan.disk_blocks) for _ in range(count)]
        # Masks of the nodes that have each block.
        self._in_host = [0] * trace.num_unique
        self._on_disk = [0] * trace.num_unique
        self._block_tokens = trace.block_tokens
        self._rates = plan.rates
        self._known: dict[tuple[int, int], dict[str, Medium]] = {}

    def stretches(self, ids: Sequence[int], num_tokens: int) -> list[Stretch]:
        """Return the prefix that the tier holds, as a lookup would say it."""
        found, at = [], 0
        for masks, run in groupby((self._in_host[one], self._on_disk[one]) for one in ids):
            if masks == (0, 0):
                break
            stop = min(num_tokens, at + self._block_tokens * sum(1 for _ in run))
            found.append(Stretch(num_tokens=stop - at, holders=self._holders(masks)))
            at = stop
        return found

    def use(self, replica: int, ids: Sequence[int]) -> None:
        """Note that a replica has just had a prompt's blocks: they are in its pool and its host."""
        bit = 1 << replica
        self.pools[replica].use(ids)
        gone = self._hosts[replica].use(ids)
        again = [block for block in ids if block in self._disks[replica]]
        lost = self._disks[replica].use([*gone[::-1], *again])
        # A block on disk stays there when it is promoted.
        for masks, came, went in ((self._in_host, ids, gone), (self._on_disk, gone, lost)):
            for block in came:
                masks[block] |= bit
            for block in went:
                masks[block] &= ~bit

    def cost(
        self,
        request: Request,
        replica: int,
        pool: Lru[int],
        stretches: Sequence[Stretch],
        *,
        load: Load,
        now: float,
    ) -> Cost:
        """Return the cost of a request on a replica with that pool and that load."""
        candidate = Candidate(
            replica=str(replica),
            node=str(replica),
            rates=self._rates,
            queue_s=load.queue_s(now),
            utilization=load.utilization(now),
            pool_tokens=self._block_tokens * pool.leading(request.ids),
        )
        return predict(candidate, request.num_tokens, stretches)

    def _holders(self, masks: tuple[int, int]) -> dict[str, Medium]:
        if masks not in self._known:
            on_host, on_disk = masks
            self._known[masks] = {
                str(node): "host" if on_host >> node & 1 else "disk"
                for node in range(len(self.pools))
                if (on_host | on_disk) >> node & 1
            }
        return self._known[masks]


class Router(Protocol):
    """Chooses a replica for each request."""

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        """Return the replica; `queues` are the requests without a first token on each."""

    def done(self, request: int, replica: int, now: float) -> None:
        """Take the first token of a request; most routers have nothing to note."""
        return


class RoundRobin(Router):
    """Takes replicas in turns."""

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._num_replicas = plan.num_replicas

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        return request.number % self._num_replicas


class PowerOfTwo(Router):
    """Draws two replicas, and takes the one with the shorter queue, as Ray Serve does."""

    def __init__(self, plan: FleetPlan, trace: Trace, memory: Memory) -> None:
        self._random = random.Random(plan.seed)

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        drawn = self._random.sample(range(len(queues)), min(2, len(queues)))
        return min(drawn, key=queues.__getitem__)


class Affinity(Router):
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
        if max(queues) - min(queues) > self._imbalance_max:
            replica = self._imbalanced.route(request, queues, now)
        else:
            replica = min(self._matching(request), key=queues.__getitem__)
        for block in request.ids:
            self._num_had[replica] += not self._had[block] >> replica & 1
            self._had[block] |= 1 << replica
        return replica

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


class Kvray(Router):
    """Predicts the first token on each replica, from what the tier holds and how fast it comes.

    Several ingresses choose together, and so as one.
    """

    def __init__(
        self, plan: FleetPlan, trace: Trace, memory: Memory, *, num_ingresses: int = 1
    ) -> None:
        self._memory = memory
        self._random = random.Random(plan.seed)
        self._ingresses = [
            [(Load(), Lru[int](plan.pool_blocks)) for _ in range(plan.num_replicas)]
            for _ in range(num_ingresses)
        ]

    def route(self, request: Request, queues: Sequence[int], now: float) -> int:
        known = self._ingresses[request.number % len(self._ingresses)]
        stretches = self._memory.stretches(request.ids, request.num_tokens)
        costs = [
            self._memory.cost(request, at, pool, stretches, load=load, now=now)
            for at, (load, pool) in enumerate(known)
        ]
        choice = choose(costs, draws=[self._random.random() for _ in costs])
        replica = int(choice.replica)
        load, pool = known[replica]
        load.routed(request.number, choice.cost.work_s, now)
        pool.use(request.ids)
        return replica

    def done(self, request: int, replica: int, now: float) -> None:
        self._ingresses[request % len(self._ingresses)][replica][0].done(request, now)


def _alone(plan: FleetPlan, trace: Trace, memory: Memory) -> Kvray:
    """Return routers that each know the requests that they sent themselves, and no others."""
    return Kvray(plan, trace, memory, num_ingresses=plan.num_ingresses)


ROUTERS: dict[str, Callable[[FleetPlan, Trace, Memory], Router]] = {
    "round_robin": RoundRobin,
    "pow2": PowerOfTwo,
    "affinity": Affinity,
    "kvray": Kvray,
    "alone": _alone,
}


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


def simulate(trace: Trace, plan: FleetPlan, *, router: str) -> FleetOutcome:
    """Return what comes of a trace with one of `ROUTERS`."""
    began_s = time.process_time()
    fleet = _Fleet(trace, plan, router)
    end_s = max(fleet.run(), 1e-9)
    shares = {name: count / max(1, trace.prompt_tokens) for name, count in fleet.tokens.items()}
    p50, p90 = np.percentile(fleet.first_token_s, (50, 90)).tolist()
    in_time = int((fleet.first_token_s <= plan.deadline_s).sum())
    mean_s = float(fleet.work_s.mean())
    return FleetOutcome(
        router=router,
        reuse=sum(shares.values()),
        **{f"{source}_reuse": share for source, share in shares.items()},
        first_token_p50_s=p50,
        first_token_p90_s=p90,
        in_time=in_time / trace.num_requests,
        goodput_per_s=in_time / end_s,
        throughput_per_s=trace.num_requests / end_s,
        load_spread=float(fleet.work_s.max()) / mean_s if mean_s else 1.0,
        utilization=mean_s / end_s,
        seconds=time.process_time() - began_s,
    )


class _Fleet:
    """Replicas that each bring and compute one prompt after the other, in the order of arrival."""

    def __init__(self, trace: Trace, plan: FleetPlan, router: str) -> None:
        self.first_token_s: Floats = np.zeros(trace.num_requests)
        self.work_s: Floats = np.zeros(plan.num_replicas)
        self.tokens: dict[str, int] = dict.fromkeys(("pool", *get_args(Source)), 0)
        self._arrivals = (trace.times / plan.speed).tolist()
        ids, starts = trace.ids.tolist(), trace.starts.tolist()
        self._requests = [
            Request(number=at, ids=ids[starts[at] : starts[at + 1]], num_tokens=num_tokens)
            for at, num_tokens in enumerate(trace.num_tokens.tolist())
        ]
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
        stretches = self._memory.stretches(request.ids, request.num_tokens)
        pool = self._memory.pools[replica]
        cost = self._memory.cost(request, replica, pool, stretches, load=Load(), now=now)
        heappush(self._ends, (now + cost.work_s, replica, cost))

    def _finish(self) -> float:
        """Give the next first token, and begin with what waits there; return the time."""
        now, replica, cost = heappop(self._ends)
        number = self._waiting[replica].popleft()
        self.first_token_s[number] = now - self._arrivals[number]
        self.work_s[replica] += cost.work_s
        self.tokens["pool"] += cost.pool_tokens
        for bring in cost.brings:
            self.tokens[bring.source] += bring.num_tokens
        self._memory.use(replica, self._requests[number].ids)
        self._router.done(number, replica, now)
        if self._waiting[replica]:
            self._begin(replica, now)
        return now


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
    """Replay a trace through each router; `progress` takes the next run, and how many are done."""
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
