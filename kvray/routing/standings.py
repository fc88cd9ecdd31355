"""What a router knows of each replica, and which of them a prompt goes to; pure."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvray.routing.choice import Choice, choose
from kvray.routing.coming import Coming
from kvray.routing.cost import Candidate, Cost, Link, Rates, predict
from kvray.routing.load import Load
from kvray.routing.lru import Lru
from kvray.routing.survey import Survey

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


class Standings:
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
        """Return the choice for a prompt, with what it would cost on each of `places`."""
        self._begin_due(now)
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
        is due.
        """
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
        """Note a request's end, or that it went elsewhere; twice is fine."""
        self.first_token(request, now)
        self._answering.pop(request, None)
        replica, words = self._under_way.pop(request, ("", ()))
        if replica in self._coming:
            self._coming[replica].remove(words)

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
