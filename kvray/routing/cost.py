"""The time to a prompt's first token on one replica, predicted by part; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvray.trace.arrival import Source

Medium = Literal["host", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way that bytes take, as measured."""

    latency_s: float = 0.0
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Return how long one transfer takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one replica computes, and how fast its node brings blocks."""

    prefill_tokens_per_s: float
    token_bytes: float
    host: Link
    """From the node's host memory into the replica's pool; the last step of every source."""
    remote: Link
    """From another node; `peers` has those that were measured by themselves."""
    disk: Link | None = None
    """None: no node has a disk."""
    peers: Mapping[str, Link] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tokens of a prompt that the same nodes hold, in whole blocks."""

    num_tokens: int
    holders: Mapping[str, Medium]
    """Node -> the fastest medium that has them there; never empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One replica that may get a request, and what is known of it."""

    replica: str
    node: str
    rates: Rates
    queue_s: float
    """Work that waits there, and what is left of the work that is being done."""
    utilization: float
    """Work that it lately got for each second."""
    pool_tokens: int
    """Leading tokens of the prompt that its own pool most likely still has."""
    slowdown: float = 1.0
    """So many times longer a token takes there now, for the answers that are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Tokens that come from one source, and how long they take."""

    source: Source
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one request costs on one replica; the parts add up to the first token."""

    replica: str
    pool_tokens: int
    """They cost nothing."""
    brings: tuple[Bring, ...]
    """In the order of the prompt, after the pool's."""
    computed_tokens: int
    queue_s: float
    compute_s: float
    utilization: float = 0.0

    @property
    def bring_s(self) -> float:
        """Time for bytes to come, from all sources."""
        return sum(bring.seconds for bring in self.brings)

    @property
    def work_s(self) -> float:
        """What the request adds to the replica's queue."""
        return self.bring_s + self.compute_s

    @property
    def first_token_s(self) -> float:
        """The predicted time to the first token."""
        return self.queue_s + self.work_s

    def tokens_from(self, source: Source) -> int:
        """Return how many tokens come from a source."""
        return sum(bring.num_tokens for bring in self.brings if bring.source == source)


def predict(candidate: Candidate, num_tokens: int, stretches: Sequence[Stretch]) -> Cost:
    """Return the cost of a prompt on a candidate.

    It brings as much of the prefix as saves time over computing it, as the tier's stager does. An
    engine computes the last token in any case.

    Args:
        candidate: the replica.
        num_tokens: tokens of the prompt.
        stretches: the prefix that the tier holds, from the first token on, without a gap.
    """
    per_token_s = candidate.slowdown / candidate.rates.prefill_tokens_per_s
    most = max(0, num_tokens - 1)
    here = min(candidate.pool_tokens, most)
    brings = _brings(candidate, here, most, stretches)
    best, saved_s, most_s = 0, 0.0, 0.0
    for count, bring in enumerate(brings, start=1):
        saved_s += bring.num_tokens * per_token_s - bring.seconds
        if saved_s > most_s:
            best, most_s = count, saved_s
    taken = tuple(brings[:best])
    computed = num_tokens - here - sum(bring.num_tokens for bring in taken)
    return Cost(
        replica=candidate.replica,
        pool_tokens=here,
        brings=taken,
        computed_tokens=computed,
        queue_s=candidate.queue_s,
        compute_s=computed * per_token_s,
        utilization=candidate.utilization,
    )


def _brings(
    candidate: Candidate, start: int, stop: int, stretches: Sequence[Stretch]
) -> list[Bring]:
    """Return what could be brought of tokens `start` to `stop`, each from its fastest source."""
    found, at = [], 0
    for stretch in stretches:
        first, at = max(at, start), min(at + stretch.num_tokens, stop)
        if at > first:
            found.append(_bring(candidate, at - first, stretch.holders))
    return found


def _bring(candidate: Candidate, num_tokens: int, holders: Mapping[str, Medium]) -> Bring:
    rates, num_bytes = candidate.rates, num_tokens * candidate.rates.token_bytes
    copy_s = rates.host.seconds(num_bytes)
    if holders.get(candidate.node) == "host":
        return Bring(source="host", num_tokens=num_tokens, seconds=copy_s)
    read_s = rates.disk.seconds(num_bytes) if rates.disk is not None else 0.0
    ways: list[tuple[float, Source]] = []
    for node, medium in holders.items():
        before_s = read_s if medium == "disk" else 0.0
        if node == candidate.node:
            ways.append((before_s, "disk"))
        else:
            link = rates.peers.get(node, rates.remote)
            ways.append((before_s + link.seconds(num_bytes), "remote"))
    seconds, source = min(ways)
    return Bring(source=source, num_tokens=num_tokens, seconds=seconds + copy_s)
