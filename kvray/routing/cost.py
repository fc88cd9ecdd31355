"""The time to a prompt's first token on one replica, predicted by part; pure.

`PrefillSpeed` is how fast an engine computes prompts, from what its answers tell.
"""

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


PREFILL_STAT = "kvray_prefill_tokens_per_s"
SLOWDOWN_STAT = "kvray_decode_slowdown"
"""Under these names the `record_routing_stats` of a deployment tells its routers."""

_SLOWDOWN_MAX = 2.0
_TOKENS_MIN = 128
"""A first token after fewer tells more of what a pass costs than of what a token costs."""
_KEPT = 0.95
"""What each answer leaves of the weight of those before."""
_RIDGE = 1.0
"""Variance of the number of answers at which half of what they seem to cost is believed: a few
answers that were slow by chance must not make busy replicas look far slower."""


class PrefillSpeed:
    """Seconds per token, a line over the answers under way, by ridge regression; newer count more.

    Prompts that one pass computes have their first tokens at once. So only sums tell how long a
    token takes, and no prompt alone.
    """

    def __init__(self) -> None:
        # Of the tokens: their number, answers under way beside them, these squared, seconds, and
        # answers times seconds.
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def note(self, num_computed: int, seconds: float, num_answering: int) -> None:
        """Note a prompt.

        Args:
            num_computed: its tokens that were computed.
            seconds: from when it came, or from the first token of the prompt before it if that was
                later, to its own first token.
            num_answering: answers that were under way.
        """
        if num_computed < _TOKENS_MIN or seconds < 0:
            return
        n, x = num_computed, num_answering
        self._n = _KEPT * self._n + n
        self._x = _KEPT * self._x + n * x
        self._xx = _KEPT * self._xx + n * x * x
        self._y = _KEPT * self._y + seconds
        self._xy = _KEPT * self._xy + x * seconds

    @property
    def tokens_per_s(self) -> float:
        """Without anything beside; 0: not known yet."""
        token_s, _ = self._line()
        return 1 / token_s if token_s > 0 else 0.0

    @property
    def decode_slowdown(self) -> float:
        """By what part of itself a prefill takes longer for each answer under way."""
        token_s, answer_s = self._line()
        return answer_s / token_s if token_s > 0 else 0.0

    def _line(self) -> tuple[float, float]:
        """Return a token's seconds without answers, and those that each answer adds."""
        if not self._n:
            return 0.0, 0.0
        spread = max(0.0, self._n * self._xx - self._x * self._x) + _RIDGE * self._n * self._n
        answer_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        token_s = (self._y - answer_s * self._x) / self._n
        if answer_s > _SLOWDOWN_MAX * token_s:
            token_s = self._y / (self._n + _SLOWDOWN_MAX * self._x)
            answer_s = _SLOWDOWN_MAX * token_s
        return token_s, answer_s
