"""How many parts of the tier there should be, how many answer, and how often one stopped; pure."""

from collections import Counter
from collections.abc import Collection, Set

from kvray.actors.telemetry.figures import Figures, Series, Totals

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
