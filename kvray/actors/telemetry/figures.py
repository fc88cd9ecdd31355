"""Values of metrics at one moment, and how totals become the increments of Ray's counters; pure.

Ray's counters take increments and outlive the process that gave them. So every increment must be
given once, also after a restart: an engine's totals then start over, while those of a shard's
engines and arena go on.

Part counts are how many parts there should be, how many answer, and how often one stopped.
"""

from collections import Counter
from collections.abc import Collection, Container, Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Series = tuple[str, tuple[str, ...]]
"""A metric's name without `kvray_`, and the values of its labels."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one source; see `Increments.take`."""

    source: Hashable
    totals: Mapping[Series, float]
    life: Hashable = None
    counted_before: bool = False


@dataclass(slots=True)
class Figures:
    """Gauges, and the totals of each source."""

    gauges: dict[Series, float] = field(default_factory=dict)
    totals: list[Totals] = field(default_factory=list)


class Increments(Generic[K]):
    """The reported share of each source's totals."""

    def __init__(self) -> None:
        # Source -> its life, and the highest totals of that.
        self._highs: dict[Hashable, tuple[Hashable, dict[K, float]]] = {}

    def take(
        self,
        source: Hashable,
        totals: Mapping[K, float],
        *,
        life: Hashable = None,
        counted_before: bool = False,
    ) -> dict[K, float]:
        """Return the increments of `totals`, which are never negative.

        Within one life, a total that falls has no increment until it is higher than ever before.
        Another `life` counts from 0 again. `counted_before`: somebody else gave the first totals of
        a new source.
        """
        if source not in self._highs and counted_before:
            self._highs[source] = life, dict(totals)
        elif source not in self._highs or self._highs[source][0] != life:
            self._highs[source] = life, {}
        _, highs = self._highs[source]
        grown = {}
        for key, total in totals.items():
            high = highs.get(key, 0.0)
            grown[key] = max(0.0, total - high)
            highs[key] = max(high, total)
        return grown

    def retain(self, sources: Container[Hashable]) -> None:
        """Forget all sources but these."""
        self._highs = {name: one for name, one in self._highs.items() if name in sources}


_KINDS = ("shard", "mover", "lookup")


class PartCounts:
    """The supervisor's figures; a part's kind is told by its name, `kvray-<kind>...`."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()
        self._alive: set[str] = set()
        self._answering: Counter[str] = Counter()
        self._outages: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def expect(self, parts: Collection[str]) -> None:
        """Take note of the parts that there should be."""
        self._expected = _kinds(parts)
        self._alive.intersection_update(parts)
        self._answering = _kinds(self._alive)

    def note(self, asked: Set[str], alive: Set[str], ended: Collection[str]) -> Figures:
        """Take note of a round, and return the figures of now.

        An outage is a part that answered in one round and not in the next that asked it. `alive`
        have answered, or were heard of otherwise. `ended` are the parts that the supervisor ended
        because they were frozen. It looks only at parts that changed: it may be called often.
        """
        stopped, came = (asked - alive) & self._alive, alive - self._alive
        self._outages.update(_kinds(stopped))
        self._ended.update(_kinds(ended))
        self._answering.update(_kinds(came))
        self._answering.subtract(_kinds(stopped))
        self._alive = (self._alive - stopped) | came
        gauges: dict[Series, float] = {}
        totals: dict[Series, float] = {}
        for kind in _KINDS:
            gauges["parts", (kind,)] = self._expected[kind]
            gauges["answering_parts", (kind,)] = self._answering[kind]
            totals["outages_total", (kind,)] = self._outages[kind]
            totals["ended_parts_total", (kind,)] = self._ended[kind]
        return Figures(gauges=gauges, totals=[Totals(source="parts", totals=totals)])


def _kinds(names: Collection[str]) -> Counter[str]:
    return Counter(kind for name in names for kind in _KINDS if name.startswith(f"kvray-{kind}"))
