"""How many parts of the tier there should be, how many answer, and how often one stopped; pure."""

from collections import Counter
from collections.abc import Collection

from kvray.actors.telemetry.figures import Figures, Series, Totals

_KINDS = ("shard", "mover", "lookup")


class PartCounts:
    """The supervisor's figures; a part's kind is told by its name, `kvray-<kind>...`."""

    def __init__(self) -> None:
        self._alive: frozenset[str] = frozenset()
        self._outages: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def note(
        self, parts: Collection[str], alive: Collection[str], ended: Collection[str]
    ) -> Figures:
        """Take note of a round of pings, and return the figures of now.

        An outage is a part that answered in one round and not in the next. `ended` are the parts
        that the supervisor ended because they were frozen.
        """
        self._outages.update(_kinds((self._alive & frozenset(parts)) - frozenset(alive)))
        self._ended.update(_kinds(ended))
        self._alive = frozenset(alive)
        expected, answering = _kinds(parts), _kinds(alive)
        gauges: dict[Series, float] = {}
        totals: dict[Series, float] = {}
        for kind in _KINDS:
            gauges["parts", (kind,)] = expected[kind]
            gauges["answering_parts", (kind,)] = answering[kind]
            totals["outages_total", (kind,)] = self._outages[kind]
            totals["ended_parts_total", (kind,)] = self._ended[kind]
        return Figures(gauges=gauges, totals=[Totals(source="parts", totals=totals)])


def _kinds(names: Collection[str]) -> Counter[str]:
    return Counter(kind for name in names for kind in _KINDS if name.startswith(f"kvray-{kind}"))
