"""What a router knows of each replica, and which of them a prompt goes to; pure.

It knows the work that each has and had (`Load`), the blocks of prompts under way (`Coming`), and
which blocks a pool most likely has (`Lru`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from kvray.routing.choice import RECENT_S, Choice, choose
from kvray.routing.cost import Candidate, Cost, Link, Rates, predict
from kvray.routing.survey import Survey

_Block = TypeVar("_Block", bound=Hashable)
_LATE = 0.25
"""Of the time that a request has run, what it still takes at least: predictions are often wrong,
and a replica where one hangs must not look idle."""


class Load:
    """Predicted work that was routed to a replica: what waits, and what lately came.

    A router sees a request's first token, and not when an engine began with it. The oldest request
    is taken to run since the first token of the one before.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, float]] = {}
        """Request -> its work, and when it was routed."""
        self._waiting_s = 0.0
        self._began_at = 0.0
        """When the oldest of `_waiting` began to run."""
        self._recent_s = 0.0
        self._recent_at = 0.0

    def __len__(self) -> int:
        """Return how many requests have no first token yet."""
        return len(self._waiting)

    def queue_s(self, now: float) -> float:
        """Return how long a request that comes now waits for the others."""
        if not self._waiting:
            return 0.0
        oldest_s, ran_s = next(iter(self._waiting.values()))[0], now - self._began_at
        left_s = min(oldest_s, max(oldest_s - ran_s, _LATE * ran_s))
        return max(0.0, self._waiting_s - oldest_s + left_s)

    def utilization(self, now: float) -> float:
        """Return the work that lately came for each second, older work counting less."""
        return self._recent_s * math.exp((self._recent_at - now) / RECENT_S) / RECENT_S

    def routed(self, request: Hashable, work_s: float, now: float) -> None:
        """Note a request that goes to this replica."""
        if not self._waiting:
            self._began_at = now
        self._waiting[request] = work_s, now
        self._waiting_s += work_s
        self._recent_s = self.utilization(now) * RECENT_S + work_s
        self._recent_at = now

    def done(self, request: Hashable, now: float) -> None:
        """Note a request's first token, or its failure; an unknown request is nobody's."""
        if request not in self._waiting:
            return
        if request == next(iter(self._waiting)):
            self._began_at = now
        work_s, _ = self._waiting.pop(request)
        # Sums of floats drift; an empty queue is 0.
        self._waiting_s = self._waiting_s - work_s if self._waiting else 0.0

    def withdrawn(self, request: Hashable, now: float) -> None:
        """Note that a request did not come here: its work did not either."""
        work_s, at = self._waiting.get(request, (0.0, now))
        came_s = self._recent_s - work_s * math.exp((at - self._recent_at) / RECENT_S)
        self._recent_s = max(0.0, came_s)
        self.done(request, now)


class Lru(Generic[_Block]):
    """The blocks of prompts, those of the oldest first out, and leaves before their parents.

    Engines evict so. They say little of their pools, but one of known size is easy to guess.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # Oldest first.
        self._blocks: OrderedDict[_Block, None] = OrderedDict()

    def __contains__(self, block: _Block) -> bool:
        return block in self._blocks

    def leading(self, blocks: Sequence[_Block]) -> int:
        """Return how many of a prompt's leading blocks are here.

        No block is here without its parents, which were used whenever it was, and after it.
        """
        return leading(blocks, self._blocks)

    def use(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Note that a prompt uses these blocks; return the blocks that went for them.

        Of a prompt that is too large, the leading blocks stay.
        """
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        count = len(self._blocks) - self._num_blocks
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]


def leading(blocks: Sequence[_Block], held: Container[_Block]) -> int:
    """Return how many leading blocks are held; none is without those before it."""
    if not blocks or blocks[0] not in held:
        return 0  # which is most often so
    return bisect_left(range(len(blocks)), True, key=lambda at: blocks[at] not in held)


class Coming(Generic[_Block]):
    """What an engine's pool has or will have before it comes to a prompt that is sent now.

    Its events tell of a block after it is computed, and it keeps those of prompts under way.
    """

    def __init__(self) -> None:
        self._blocks: Counter[_Block] = Counter()

    def leading(self, blocks: Sequence[_Block]) -> int:
        """Return how many of a prompt's leading blocks are here."""
        return leading(blocks, self._blocks)

    def add(self, blocks: Sequence[_Block]) -> None:
        """Note a prompt that is sent."""
        self._blocks.update(blocks)

    def remove(self, blocks: Sequence[_Block]) -> None:
        """Note its end."""
        for block in blocks:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]


_HOST = Link(bytes_per_s=10e9)
"""From a node's memory into an engine's pool; far above any rate of computing."""
_DISK = Link(latency_s=1e-3, bytes_per_s=2e9)
_REMOTE = Link(latency_s=5e-3, bytes_per_s=2e9)
"""Guesses, for what nobody has measured yet."""
_ALIKE = 1.3
"""Speeds closer to the usual one are taken to be equal: each is measured on a few prompts, and a
replica that looks a little slower would idle while prompts wait for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMatch:
    """What the events of an engine say of a prompt."""

    num_tokens: int
    """Its leading tokens that the engine's own pool has."""
    is_sure: bool
    """Whether there are no more: else some may be there that no event told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A replica that can take a request now."""

    replica: str
    node: str
    """Its shard; empty while that is not known."""
    prefill_tokens_per_s: float
    """As measured; 0: not yet."""
    decode_slowdown: float = 0.0
    """By what part of itself a prefill takes longer for each answer under way there, measured."""
    disk: Link | None = None
    """Of its node, as measured."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Shard -> how fast it gives blocks to this node, as measured."""
    pool: PoolMatch | None = None
    """None: its engine's events are not heard."""


class ReplicaLoads:
    """The load of each replica, as this router has routed to it, and what its pool has.

    Where an engine's events are heard, they say it; the prompts that are under way there come on
    top. Elsewhere it is guessed: the blocks of what was sent there, the oldest first out.
    """

    def __init__(self, *, pool_blocks: int, prefill_tokens_per_s: float) -> None:
        """Take pools to have so many blocks, and replicas nobody has measured to be so fast."""
        self._pool_blocks = pool_blocks
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._loads: dict[str, Load] = {}
        self._pools: dict[str, Lru[bytes]] = {}
        self._coming: dict[str, Coming[bytes]] = {}
        self._under_way: dict[str, tuple[str, Sequence[bytes]]] = {}
        """Request -> its replica and its blocks there."""
        # Request -> its replica, and when its first token is due; never if somebody tells.
        self._waiting: dict[str, tuple[str, float]] = {}
        self._answering: dict[str, str] = {}
        """Request -> its replica, from its first token on."""
        self._random = random.Random()

    def retain(self, replicas: Iterable[str]) -> None:
        """Know these replicas, and no others."""
        names = set(replicas)
        self._loads = {name: self._loads.get(name, Load()) for name in names}
        self._pools = {name: self._pools.get(name, Lru(self._pool_blocks)) for name in names}
        self._coming = {name: self._coming.get(name, Coming()) for name in names}
        self._under_way = {key: one for key, one in self._under_way.items() if one[0] in names}
        self._waiting = {key: one for key, one in self._waiting.items() if one[0] in names}
        self._answering = {key: one for key, one in self._answering.items() if one in names}

    def choose(
        self, places: Sequence[Place], num_tokens: int, survey: Survey, *, now: float
    ) -> Choice:
        """Return the choice for a prompt, with its cost on each of `places` that is still known."""
        self._begin_due(now)
        places = [one for one in places if one.replica in self._loads]
        answering = Counter(self._answering.values())
        measured = [one for one in places if one.prefill_tokens_per_s > 0]
        speeds = [one.prefill_tokens_per_s for one in measured]
        usual = median(speeds) if speeds else self._prefill_tokens_per_s
        slowdown = median(one.decode_slowdown for one in measured) if measured else 0.0
        costs = [
            predict(
                Candidate(
                    replica=one.replica,
                    node=one.node,
                    rates=_rates(one, usual, survey.token_bytes),
                    queue_s=self._loads[one.replica].queue_s(now),
                    utilization=self._loads[one.replica].utilization(now),
                    slowdown=1 + slowdown * answering[one.replica],
                    pool_tokens=self._pool_tokens(one, survey),
                ),
                num_tokens,
                survey.stretches,
            )
            for one in places
        ]
        return choose(costs, draws=[self._random.random() for _ in costs])

    def routed(
        self, request: str, cost: Cost, survey: Survey, *, now: float, is_told: bool = False
    ) -> None:
        """Note that a request goes to the replica where it has this cost.

        `is_told`: somebody will say when its first token is there; else it is taken to come when it
        is due. A replica that ended while its router chose has no load any more.
        """
        if cost.replica not in self._loads:
            return
        self._loads[cost.replica].routed(request, cost.work_s, now)
        self._pools[cost.replica].use(survey.words)
        self._coming[cost.replica].add(survey.words)
        self._under_way[request] = cost.replica, survey.words
        due_at = math.inf if is_told else now + cost.first_token_s
        self._waiting[request] = cost.replica, due_at

    def first_token(self, request: str, now: float) -> None:
        """Note that a prompt is computed, and its answer goes on; twice is fine."""
        replica, _ = self._waiting.pop(request, ("", 0.0))
        if replica in self._loads:
            self._loads[replica].done(request, now)
            self._answering[request] = replica

    def done(self, request: str, now: float) -> None:
        """Note a request's end; twice is fine."""
        self.first_token(request, now)
        self._answering.pop(request, None)
        replica, words = self._under_way.pop(request, ("", ()))
        if replica in self._coming:
            self._coming[replica].remove(words)

    def withdraw(self, request: str, now: float) -> None:
        """Note that a request did not go where `routed` said; twice is fine."""
        replica, _ = self._waiting.get(request, ("", 0.0))
        if replica in self._loads:
            self._loads[replica].withdrawn(request, now)
        self.done(request, now)

    def _pool_tokens(self, place: Place, survey: Survey) -> int:
        told = place.pool
        is_sure = told is not None and told.is_sure
        likely = self._coming if is_sure else self._pools
        num_blocks = likely[place.replica].leading(survey.words)
        return max(survey.tokens_per_block * num_blocks, 0 if told is None else told.num_tokens)

    def _begin_due(self, now: float) -> None:
        """Take prompts of which nobody tells to be computed when they were to be."""
        due = [key for key, (_, due_at) in self._waiting.items() if due_at <= now]
        for request in due:
            self.first_token(request, now)


def _rates(place: Place, usual_tokens_per_s: float, token_bytes: float) -> Rates:
    own = place.prefill_tokens_per_s or usual_tokens_per_s
    is_usual = usual_tokens_per_s / _ALIKE <= own <= usual_tokens_per_s * _ALIKE
    return Rates(
        prefill_tokens_per_s=usual_tokens_per_s if is_usual else own,
        token_bytes=token_bytes,
        host=_HOST,
        remote=_REMOTE,
        disk=place.disk or _DISK,
        peers=place.links,
    )
