"""Where prompt tokens came from over time, for the tier and for each replica; pure."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from kvray.cli.text.hits import COMPUTED, SOURCES, token_sources
from kvray.cli.text.rates import ReplicaRates

SHOWN = (*SOURCES, COMPUTED)
_POINTS_MAX = 900
_REPLICAS_MAX = 32
_GAP_S = 10.0


class Shares:
    """The latest points, of so many replicas at most; the oldest goes first."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS_MAX)

    def add(self, now: float, ranks: Iterable[ReplicaRates] = ()) -> None:
        """Take the rates of all ranks; none: the tier did not answer, which is a gap."""
        if self._points and now - self._points[-1]["at"] > _GAP_S:
            self._points.append({"at": now - 1, "rates": {}})
        totals: dict[str, Counter[str]] = {}
        for one in ranks:
            for name in ("", one.rank["replica"]):
                if name in totals or len(totals) <= _REPLICAS_MAX:
                    totals.setdefault(name, Counter()).update(one.counters)
        rates = {name: [*token_sources(counters).values()] for name, counters in totals.items()}
        self._points.append(
            {"at": now, "rates": {name: [round(r, 1) for r in one] for name, one in rates.items()}}
        )

    def since(self, at: float) -> list[dict[str, Any]]:
        """Return the points after a time: tokens a second by replica, in the order of `SHOWN`."""
        return [one for one in self._points if one["at"] > at]
