"""What the tier has answered so far, and since when a part of it has not; pure.

Times are seconds since the epoch. No figure leaves without its age.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvray.cli.doctor.finding import Finding
from kvray.cli.doctor.tier import hit_findings, tier_findings
from kvray.cli.hits import COMPUTED, SOURCES, History, ReplicaRates, ranks_of, token_sources
from kvray.cli.page import panels

SHOWN = (*SOURCES, COMPUTED)
_POINTS_MAX = 900
_REPLICAS_MAX = 32
_GAP_S = 10.0
STATUS, CONTENTS, REQUESTS = "status", "contents", "requests"
EVERY_S = {STATUS: 2.0, CONTENTS: 10.0, REQUESTS: 5.0}
"""The parts of the page, each with the time between two questions."""
_LATE_S = 8.0
"""How much longer than that an answer may take, before its figures are old."""
_WINDOW_S = 10.0


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


@dataclass(slots=True)
class _Part:
    """The latest answer of one part, and why there has been none since."""

    answer: Any = None
    answered_at: float | None = None
    trouble: str = ""
    trouble_at: float | None = None


class Board:
    """The state of the page."""

    def __init__(self, cluster_name: str) -> None:
        """Start without answers of the tier of that name."""
        self._cluster_name = cluster_name
        self._parts = {name: _Part() for name in EVERY_S}
        self._rates = History(_WINDOW_S)
        self._is_interrupted = False
        self._shares = Shares()
        self._panels: dict[str, Any] = {}
        self._faults: list[Finding] = []
        self._seen: dict[str, tuple[float, Mapping[str, Any]]] = {}  # shard -> its last answer
        self._found: dict[str, float] = {}  # check of a finding -> when it was found first

    def take(self, told: Mapping[str, Any], now: float) -> None:
        """Take the answer of a part, or its trouble."""
        part = self._parts[told["part"]]
        if "trouble" in told:
            part.trouble_at = now if part.trouble_at is None else part.trouble_at
            part.trouble = told["trouble"]
        else:
            part.answer, part.answered_at = told["answer"], now
            part.trouble, part.trouble_at = "", None
        if told["part"] == STATUS:
            self._take_status(told.get("answer"), now)

    def lose(self, why: str, now: float) -> None:
        """Note that the process that asks is gone; what was wrong before says more."""
        if not self._parts[STATUS].trouble:
            self.take({"part": STATUS, "trouble": why}, now)

    def state(self, now: float, since: float) -> dict[str, Any]:
        """Return all panels, with those points of the history that are later than `since`."""
        found: dict[str, Any] = {
            "tier": self._cluster_name,
            "parts": {name: self._part(name, now) for name in EVERY_S},
            "shares": {"names": SHOWN, "points": self._shares.since(since)},
        }
        status = self._parts[STATUS].answer
        if status is not None:
            found |= self._panels | {"nodes": panels.nodes(self._rates, self._seen, now)}
            found["findings"] = [
                {"verdict": one.verdict, "text": f"{one.check}: {one.says}; {one.fix}."}
                | {"age_s": _age(self._found[one.check], now)}
                for one in self._faults
            ]
        if (contents := self._parts[CONTENTS].answer) is not None and status is not None:
            found["prefixes"] = panels.prefixes_panel(status["shards"], contents)
        if (requests := self._parts[REQUESTS].answer) is not None:
            found["requests"] = panels.requests_panel(requests, now)
        return found

    def _take_status(self, status: Mapping[str, Any] | None, now: float) -> None:
        if status is None:
            self._shares.add(now)
            self._is_interrupted = True
            return
        if self._is_interrupted:  # rates over a gap would be none of the present
            self._rates.forget()
            self._is_interrupted = False
        self._rates.add(now, status)
        self._shares.add(now, self._rates.replicas())
        there = {one["shard"]: one for one in status["shards"]}
        self._seen = {name: seen for name, seen in self._seen.items() if name in there} | {
            name: (now, one) for name, one in there.items() if "arena" in one
        }
        self._panels = panels.status_panels(status, self._rates)
        self._faults = _faults(status)
        self._found = {one.check: self._found.get(one.check, now) for one in self._faults}

    def _part(self, name: str, now: float) -> dict[str, Any]:
        part = self._parts[name]
        return {
            "age_s": _age(part.answered_at, now),
            "old_after_s": EVERY_S[name] + _LATE_S,
            "trouble": part.trouble,
            "trouble_s": _age(part.trouble_at, now),
        }


def _faults(status: Mapping[str, Any]) -> list[Finding]:
    """Return what `kvray doctor` finds wrong with a status, faults first."""
    found = [*tier_findings(status)]
    if ranks_of(status["shards"]) or not panels.silent(status["shards"]):
        found += hit_findings(status)  # else replicas may be where nobody answers
    return [one for kind in ("fault", "hint") for one in found if one.verdict == kind]


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(max(0.0, now - at), 1)
