"""The page's state as plain data; pure. Times are since the epoch, and every figure has its age."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from kvray.actors.hosts import named
from kvray.actors.names import node_of
from kvray.actors.tier.sizing import combined
from kvray.cli import hits
from kvray.cli.doctor.tier import Finding, hit_findings, tier_findings
from kvray.cli.explain import age_text, request_report, requests_sentence
from kvray.cli.ls import model_text, namespaces, namespaces_table, prefixes, prefixes_table
from kvray.cli.size import TOO_LITTLE, sizing_sentences, sizing_title, sure_of
from kvray.cli.status import disk_used, headline, memory_used, state_text
from kvray.cli.transports import node_links, node_links_table, slow_nodes
from kvray.config import format_size
from kvray.metrics import figure
from kvray.trace.arrival import source_of

SHOWN = (*hits.SOURCES, hits.COMPUTED)
_POINTS_MAX = 900
_REPLICAS_MAX = 32
_GAP_S = 10.0
STATUS, CONTENTS, REQUESTS = "status", "contents", "requests"
EVERY_S = {STATUS: 2.0, CONTENTS: 10.0, REQUESTS: 5.0}
"""The parts of the page, each with the time between two questions."""
_LATE_S = 8.0
"""How much longer than that an answer may take, before its figures are old."""
_WINDOW_S = 10.0
_HOUR_S, _HOUR_STEP_S = 3600.0, 10.0


class Shares:
    """The latest points, of so many replicas at most; the oldest goes first."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS_MAX)

    def add(self, now: float, ranks: Iterable[hits.ReplicaRates] = ()) -> None:
        """Take the rates of all ranks; none: the tier did not answer, which is a gap."""
        if self._points and now - self._points[-1]["at"] > _GAP_S:
            self._points.append({"at": now - 1, "rates": {}})
        totals: dict[str, Counter[str]] = {}
        for one in ranks:
            for name in ("", one.rank["replica"]):
                if name in totals or len(totals) <= _REPLICAS_MAX:
                    totals.setdefault(name, Counter()).update(one.counters)
        rates = {
            name: [round(rate, 1) for rate in hits.token_sources(counters).values()]
            for name, counters in totals.items()
        }
        self._points.append({"at": now, "rates": rates})

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


class PageState:
    """The state of the page."""

    def __init__(self, cluster_name: str) -> None:
        self._cluster_name = cluster_name
        self._parts = {name: _Part() for name in EVERY_S}
        self._rates = hits.History(_WINDOW_S)
        self._is_interrupted = False
        self._shares = Shares()
        self._hosts: Mapping[str, Mapping[str, str]] = {}
        self._hour: deque[tuple[float, Mapping[str, float]]] = deque()
        """Counters of all ranks, of the last hour."""
        self._panels: dict[str, Any] = {}
        self._faults: list[Finding] = []
        self._seen: dict[str, tuple[float, Mapping[str, Any]]] = {}  # shard -> its last answer
        self._found: dict[str, float] = {}  # check of a finding -> when it was found first

    def take(self, told: Mapping[str, Any], now: float) -> None:
        """Take the answer of a part, or its trouble."""
        part = self._parts[told["part"]]
        if told["part"] == STATUS and "answer" in told:
            self._hosts = told["answer"].get("hosts", {})
        told = named(told, self._hosts)
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
            "parts": {
                name: {
                    "age_s": _age(part.answered_at, now),
                    "old_after_s": EVERY_S[name] + _LATE_S,
                    "trouble": part.trouble,
                    "trouble_s": _age(part.trouble_at, now),
                }
                for name, part in self._parts.items()
            },
            "shares": {"names": SHOWN, "points": self._shares.since(since)},
        }
        status = self._parts[STATUS].answer
        if status is not None:
            nodes = [_node(one, self._seen, now) for one in self._rates.nodes()]
            nodes.sort(key=lambda one: str(one["name"]))
            found |= self._panels | {"nodes": nodes}
            known = [self._seen.get(one["shard"], (0.0, one))[1] for one in status["shards"]]
            found["figures"] = self._figures(known, hits.first_token_texts(status))
            found["findings"] = [
                {"verdict": one.verdict, "text": f"{one.check}: {one.says}; {one.fix}."}
                | {"age_s": _age(self._found[one.check], now)}
                for one in self._faults
            ]
        if (contents := self._parts[CONTENTS].answer) is not None and status is not None:
            found["prefixes"] = prefixes_panel(status["shards"], contents)
        if (requests := self._parts[REQUESTS].answer) is not None:
            found["requests"] = requests_panel(requests, now)
        return found

    def _take_status(self, status: Mapping[str, Any] | None, now: float) -> None:
        if status is None:
            self._shares.add(now)
            self._is_interrupted = True
            return
        if self._is_interrupted:  # rates over a gap would be none of the present
            self._rates = hits.History(_WINDOW_S)
            self._is_interrupted = False
        self._rates.add(now, status)
        self._shares.add(now, self._rates.replicas())
        there = {one["shard"]: one for one in status["shards"]}
        self._seen = {name: seen for name, seen in self._seen.items() if name in there} | {
            name: (now, one) for name, one in there.items() if "arena" in one
        }
        shards = status["shards"]
        totals = hits.total_counters([*hits.ranks_of(shards), *hits.ended_of(shards)])
        totals["answering"] = len(shards) - len(silent(shards))
        last = self._hour[-1][1] if self._hour else totals
        # Counters that come or go with their node are no growth: it begins anew.
        grows = totals["prompt_tokens"] >= last["prompt_tokens"]
        if not grows or totals["answering"] != last["answering"]:
            self._hour.clear()
        if not self._hour or now - self._hour[-1][0] >= _HOUR_STEP_S:
            self._hour.append((now, totals))
            while now - self._hour[0][0] > _HOUR_S:
                self._hour.popleft()
        self._panels = status_panels(status, self._rates)
        findings = [*tier_findings(status)]
        if hits.ranks_of(status["shards"]) or not silent(status["shards"]):
            findings += hit_findings(status)  # else replicas may be where nobody answers
        self._faults = [
            one for kind in ("fault", "hint") for one in findings if one.verdict == kind
        ]
        self._found = {one.check: self._found.get(one.check, now) for one in self._faults}

    def _figures(
        self, shards: "Shards", first_tokens: tuple[str, str] | None
    ) -> list[dict[str, str]]:
        """Return the large figures: hits, speed, room and faults, each with what it is of."""
        rates = hits.total_counters({"counters": one.counters} for one in self._rates.replicas())
        (first, before), (last, after) = self._hour[0], self._hour[-1]
        grown = {name: max(0, value - before.get(name, 0)) for name, value in after.items()}
        made = [
            _large("hit rate now", hits.hit_share(rates), "of prompt tokens"),
            _large("hit rate, 1 h", hits.hit_share(grown), f"of those of {age_text(last - first)}"),
            _large("prompt tokens", f"{rates['prompt_tokens']:,.0f}", "per second"),
        ]
        if first_tokens:
            made.append(
                _large("first token, 10 min", first_tokens[0], f"p50; p90 {first_tokens[1]}")
            )
        for name, used in (("memory", memory_used), ("disk", disk_used)):
            both = [used(shard) for shard in shards]
            taken, size = sum(one for one, _ in both), sum(one for _, one in both)
            if size:
                made.append(_large(name, format_size(taken), f"of {format_size(size)} taken"))
        num_faults = sum(one.verdict == "fault" for one in self._faults)
        return [*made, _large("faults", str(num_faults), "at present")]


def _large(name: str, value: str, of: str) -> dict[str, str]:
    return {"name": name, "value": value or "\N{EN DASH}", "of": of}


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(max(0.0, now - at), 1)


Shards = Sequence[Mapping[str, Any]]
Seen = Mapping[str, tuple[float, Mapping[str, Any]]]

HOTTEST = 8
_LINKS_MAX = 40
_CURVES_MAX = 4


def status_panels(status: Mapping[str, Any], rates: hits.History) -> dict[str, Any]:
    """Return what `kvray status` knows, with rates, except for the nodes."""
    shards = status["shards"]
    links = node_links(dict(status))
    links.sort(
        key=lambda link: (bool(link.transport), link.breaker == "closed", link.bytes_per_s or 1e12)
    )
    replicas = rates.replicas()
    totals = hits.total_counters([*hits.ranks_of(shards), *hits.ended_of(shards)])
    prompt = totals["prompt_tokens"]
    without = ", ".join(silent(shards))
    return {
        "headline": headline(status),
        "links": plain(node_links_table(links[:_LINKS_MAX])) if links else None,
        "num_links_hidden": max(0, len(links) - _LINKS_MAX),
        "slow": [f"{node} {says}." for node, says in slow_nodes(links)],
        "replicas": plain(hits.replicas_table(replicas)) if replicas else None,
        "totals": f"{prompt:,} prompt tokens so far: {hits.sources_sentence(totals)}"
        if prompt
        else "",
        "without": f"Without node {without}, which does not answer." if without else "",
        "curve": _curve(combined(shards)),
    }


def silent(shards: Shards) -> list[str]:
    """Return the nodes whose shards do not answer."""
    return [node_of(one["shard"]) for one in shards if one["state"] == "unreachable"]


def prefixes_panel(shards: Shards, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kvray ls` shows: all namespaces, and the prefixes of the largest."""
    entries = namespaces(shards, answer["contents"])
    sizes = {one["namespace"]: one["fields"].get("tokens_per_block", 0) for one in entries}
    models = {one["namespace"]: model_text(one["fields"]) for one in entries}
    hottest = {name: prefixes(told)[:HOTTEST] for name, told in answer["prefixes"].items()}
    return {
        "namespaces": plain(namespaces_table(entries)) if entries else None,
        "hottest": [
            {"of": f"{models.get(name) or 'namespace'} ({name})"}
            | {"table": plain(prefixes_table(told, sizes.get(name, 0)))}
            for name, told in hottest.items()
        ],
        "silent": [one["shard"] for one in shards if one["shard"] not in answer["contents"]],
    }


def requests_panel(answer: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the latest requests, and one that was looked for, with the text of `kvray explain`."""
    requests = answer["requests"]
    found = answer.get("found", {"id": None, "requests": [], "says": ""})
    return {
        "says": requests_sentence(requests) if requests else answer.get("says", ""),
        "silent": answer["silent"],
        "list": [_request(one, now) for one in requests],
        "found": {**found, "requests": [_request(one, now) for one in found["requests"]]},
    }


def _request(one: Mapping[str, Any], now: float) -> dict[str, Any]:
    tokens: Counter[str] = Counter({"own pool": one["own_tokens"]})
    for part in one["ranges"]:
        if part["what"] == "hit":
            source = source_of(part["way"], part["source"])
            tokens[source] += part["stop"] - part["start"]
    return {
        "id": f"{one['replica']} {one['rank']} {one['request_id']} {one['at']}",
        "number": str(one["request_id"]),  # more than a browser's numbers can tell apart
        "replica": one["replica"],
        "age_s": round(max(0.0, now - one["at"]), 1),
        "tokens": one["num_tokens"],
        "sources": [tokens[name] for name in hits.SOURCES],
        "missed": one["missed_tokens"],
        "report": [plain(part) for part in request_report(one, now=now)],
    }


def _node(rates: hits.NodeRates, seen: Seen, now: float) -> dict[str, Any]:
    """Return a node, with its last figures and their age if it does not answer."""
    shard = rates.shard
    at, known = seen.get(shard["shard"], (now, shard))
    is_old = "arena" not in shard and "arena" in known
    meters, figures = [], []
    if (arena := known.get("arena")) is not None:
        meters.append(_meter("memory", *memory_used(known)))
        figures.append(f"{figure(known, 'resident_blocks', tier='host'):,} blocks")
        figures.append(f"{figure(known, 'leased_blocks'):,} leased")
    if (nvme := known.get("nvme")) is not None:
        meters.append(_meter("disk", *disk_used(known)))
        figures.append(f"{figure(known, 'resident_blocks', tier='nvme'):,} blocks on disk")
    if arena is not None and not is_old:
        figures += [
            f"{rates.evicted:,.0f} blocks/s evicted",
            f"{format_size(int(rates.staged_bytes))}/s staged",
        ]
        if nvme is not None:
            figures.append(f"{format_size(int(rates.written_bytes))}/s to disk")
            figures.append(f"{format_size(int(rates.read_bytes))}/s from disk")
    return {
        "name": node_of(known["shard"]),
        "state": state_text(shard),
        "is_healthy": shard["state"] == "serving",
        "message": shard.get("message", ""),
        "old_s": round(now - at, 1) if is_old else None,
        "meters": meters,
        "figures": figures,
    }


def _curve(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kvray size` says, and the curve of the busiest namespace."""
    entries = sure_of(found)[:_CURVES_MAX]
    if not entries:
        return {"says": [TOO_LITTLE], "points": None}
    says = [
        f"{sizing_title(one)}: {' '.join(sizing_sentences(one, [one['host_bytes']]))}"
        for one in entries
    ]
    points = {name: entries[0][name] for name in ("own", "host", "disk", "remote", "error")}
    unit, size = ("GiB", 2**30) if entries[0]["sizes"][-1] >= 2**31 else ("MiB", 2**20)
    points |= {"unit": unit, "now": entries[0]["host_bytes"] / size}
    points["sizes"] = [one / size for one in entries[0]["sizes"]]
    return {"says": says, "points": points}


def _meter(name: str, used: int, capacity: int) -> dict[str, Any]:
    share = min(1.0, used / max(1, capacity))
    text = f"{share:.0%} of {format_size(capacity)} taken"
    return {"name": name, "share": share, "text": text}


def plain(part: RenderableType) -> str | dict[str, Any]:
    """Return what a command prints as a text, or as a table of texts."""
    if not isinstance(part, Table):
        return str(part)
    return {
        "columns": [str(plain(column.header)).replace("\n", " ") for column in part.columns],
        "numbers": [column.justify == "right" for column in part.columns],
        "rows": [
            [plain(cell) for cell in row]
            for row in zip(*(column.cells for column in part.columns), strict=True)
        ],
    }
