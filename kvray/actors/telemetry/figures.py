"""Values of metrics at one moment, and how totals become the increments of Ray's counters; pure.

Ray's counters take increments and outlive the process that gave them. So every increment must be
given once, also after a restart: an engine's totals then start over, while those of a shard's
engines and arena go on. Values come from the statuses that `kvray status` shows, so the two agree.
"""

import re
from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvray.actors.names import node_of
from kvray.metrics import LATENCIES, METRICS, PREFIX
from kvray.trace.reasons import DROP_PREFIX, MISS_PREFIX, MISS_REASONS, DropReason

Series = tuple[str, tuple[str, ...]]
"""A metric's name without `kvray_`, and the values of its labels."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one source; one that starts over is another source. See `Increments.take`."""

    source: Hashable
    totals: Mapping[Series, float]
    counted_before: bool = False


@dataclass(slots=True)
class Figures:
    """Gauges, and the totals of each source."""

    gauges: dict[Series, float] = field(default_factory=dict)
    totals: list[Totals] = field(default_factory=list)


class Increments(Generic[K]):
    """The reported share of each source's totals."""

    def __init__(self) -> None:
        self._highs: dict[Hashable, dict[K, float]] = {}
        """Source -> its highest totals."""

    def take(
        self, source: Hashable, totals: Mapping[K, float], *, counted_before: bool = False
    ) -> dict[K, float]:
        """Return the increments of `totals`, which are never negative.

        A total that falls has no increment until it is higher than ever before. `counted_before`:
        somebody else gave the first totals of a new source.
        """
        highs = self._highs.setdefault(source, dict(totals) if counted_before else {})
        grown = {key: max(0.0, total - highs.get(key, 0.0)) for key, total in totals.items()}
        for key, total in totals.items():
            highs[key] = max(highs.get(key, 0.0), total)
        return grown

    def retain(self, sources: Container[Hashable]) -> None:
        """Forget all sources but these."""
        self._highs = {name: one for name, one in self._highs.items() if name in sources}


def read_status(
    part: str,
    status: Mapping[str, Any],
    labels: tuple[str, ...],
    *,
    counted_before: Container[str] = (),
) -> Figures:
    """Return the figures of a part that its status has; a missing one has no series.

    The first name of a place is the source that counts the totals; `counted_before` names those
    whose first totals somebody else gave.
    """
    gauges: dict[Series, float] = {}
    totals: dict[str, dict[Series, float]] = {}
    for metric in METRICS.values():
        for own, value in metric.read(status).items() if metric.part == part else ():
            source = metric.places[own].partition(".")[0]
            found = gauges if metric.kind == "gauge" else totals.setdefault(source, {})
            found[metric.name.removeprefix(PREFIX), (*labels, *own)] = value
    return Figures(
        gauges,
        [
            Totals(source=source, totals=its, counted_before=source in counted_before)
            for source, its in totals.items()
        ],
    )


# -- shard


_NAMESPACES_MAX = 16
"""Namespaces that have labels of their own, among those that ranks have registered."""
_OTHER = "other"


class ShardFigures:
    """Makes figures of a shard's status; remembers the namespaces and ranks in labels."""

    def __init__(self, shard: str, now: float) -> None:
        """Make those of `shard`, whose process started at `now`."""
        self._node = node_of(shard)
        self._ranks = RankFigures(self._node, now)
        self._namespaces: set[str] = set()

    def of(self, status: Mapping[str, Any], now: float) -> Figures:
        """Return the figures of what `Shard.status` returned."""
        node = (self._node,)
        serving: dict[Series, float] = {("shard_serving", node): status["state"] == "serving"}
        if (arena := status.get("arena")) is None:
            return Figures(serving)
        # The arena's tables count for as long as it is there, under however many shards.
        before = {"arena"} if arena["shard_epoch"] > 1 else ()
        made = read_status("shard", status, node, counted_before=before)
        ranks = self._ranks.look(status["replicas"], now)
        made.totals += ranks.totals
        # Only registered namespaces are labels: the arena's ids may also stand for tenants.
        for name in status["namespaces"]:
            if len(self._namespaces) < _NAMESPACES_MAX:
                self._namespaces.add(name)
        made.gauges |= ranks.gauges | serving | self._by_namespace("host", arena["namespaces"])
        for one in arena["namespaces"]:
            if one["quota_bytes"] is not None and one["namespace"] in self._namespaces:
                made.gauges["quota_bytes", (self._node, one["namespace"])] = one["quota_bytes"]
        made.gauges |= self._expected(status.get("traffic", {}))
        drain = status.get("drain")
        made.gauges["draining", node] = drain is not None
        made.gauges["drain_left_bytes", node] = (drain or {}).get("left_bytes", 0)
        if (nvme := status.get("nvme")) is not None:
            made.gauges |= self._by_namespace("nvme", nvme["namespaces"])
            made.gauges["nvme_failed", node] = bool(nvme["message"])
        return made

    def _by_namespace(self, tier: str, held: Iterable[Mapping[str, Any]]) -> dict[Series, float]:
        # An empty tier has none, and must show as empty.
        summed: Counter[str] = Counter({_OTHER: 0})
        for one in held:
            name = one["namespace"] if one["namespace"] in self._namespaces else _OTHER
            summed[name] += one["bytes"]
        return {("resident_bytes", (self._node, tier, name)): size for name, size in summed.items()}

    def _expected(self, traffic: Mapping[str, Any]) -> dict[Series, float]:
        """Return the curves of the namespaces that have labels, by memory in parts of today's."""
        made: dict[Series, float] = {}
        curves = traffic.get("namespaces", {})
        for name in self._namespaces & curves.keys():
            one = curves[name]
            columns = (one[key] for key in ("host", "disk", "remote", "error"))
            rows = zip(traffic["sizes"], *columns, strict=True) if one["is_sure"] else ()
            for size, *found, error in rows:
                labels = (self._node, name, f"{size / traffic['host_bytes']:.4g}")
                made["expected_hit_ratio", labels] = one["own"] + sum(found)
                made["expected_hit_error", labels] = error
        return made


# -- mover, lookup, supervisor


def mover_figures(mover: str, status: Mapping[str, Any]) -> Figures:
    """Return the figures of what `Mover.status` returned."""
    node = node_of(mover)
    totals: dict[Series, float] = {
        ("moved_bytes_total", (node, transport, "out")): num_bytes
        for transport, num_bytes in status.get("sent_bytes", {}).items()
    }
    # A mover counts again when its shard has another arena.
    return Figures(totals=[Totals(source=status.get("arena_id"), totals=totals)])


def lookup_figures(status: Mapping[str, Any], partition: int) -> Figures:
    """Return the figures of what `Lookup.status` returned; all partitions hear the same shards."""
    made = read_status("lookup", status, (str(partition),))
    if not partition:
        made.gauges["silent_shards", ()] = len(status["silent"])
    return made


_KINDS = ("shard", "mover", "lookup")


class PartCounts:
    """The supervisor's figures: how many parts there should be, answer, and stopped to answer.

    A part's kind is told by its name, `kvray-<kind>...`.
    """

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
        because they were frozen. Only parts that changed are counted: a tier may have thousands.
        """
        stopped, came = (asked - alive) & self._alive, alive - self._alive
        self._alive = (self._alive - stopped) | came
        self._outages.update(_kinds(stopped))
        self._ended.update(_kinds(ended))
        self._answering.update(_kinds(came))
        self._answering.subtract(_kinds(stopped))
        gauges = {"parts": self._expected, "answering_parts": self._answering}
        totals = {"outages_total": self._outages, "ended_parts_total": self._ended}
        return Figures(_series(gauges), [Totals(source="parts", totals=_series(totals))])


def _series(counts: Mapping[str, Counter[str]]) -> dict[Series, float]:
    return {(name, (kind,)): by_kind[kind] for name, by_kind in counts.items() for kind in _KINDS}


def _kinds(names: Collection[str]) -> Counter[str]:
    return Counter(kind for name in names for kind in _KINDS if name.startswith(f"kvray-{kind}"))


# -- ranks: their counters come with their reports, and start over with the rank's process. After a
# restart of the shard they are older than the shard's; `uptime_s` tells which of the two it is.


RankKey = tuple[str, int]

_LABELLED_MAX = 128
"""Ranks that have labels of their own; Ray keeps a counter's labels for ever."""
_OTHERS = _OTHER, "0"
_NAME_MAX = 64
_SLACK_S = 3.0
"""By how much a rank's `uptime_s` is behind: reports come once a second."""

_REASONS = {
    DROP_PREFIX: ("unsaved_blocks_total", frozenset(reason.value for reason in DropReason)),
    MISS_PREFIX: ("miss_tokens_total", MISS_REASONS),
}
_BOUNDS_NS = (*(float(2**bits) for bits in range(15, 33)), float("inf"))
"""Where the buckets of `kvray.engine.shared_state` end."""
_BUCKET = re.compile(rf"({'|'.join(LATENCIES)})_ns_below_(\d{{1,19}}|inf)")


@dataclass(slots=True)
class _Life:
    """The process of a rank that has reported last."""

    number: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    counted_before: bool = False


class RankFigures:
    """Remembers how to tell one life of a rank from the next."""

    def __init__(self, node: str, now: float) -> None:
        """Start at `now`, the start of the shard's process on `node`."""
        self._node = node
        self._began = now
        self._lives: dict[RankKey, _Life] = {}
        self._labels: dict[RankKey, tuple[str, str]] = {}

    def look(self, ranks: Iterable[Mapping[str, Any]], now: float) -> Figures:
        """Return the figures of `ranks`, as `Replicas.status` gives them; others are forgotten.

        A rank that has registered again, and not reported since, keeps its totals. Ray forgets a
        gauge and keeps a counter's labels for ever. So every connected rank has a gauge of its own,
        and only the first ranks have counters of their own.
        """
        made = Figures()
        by_key = {(rank["replica"], rank["rank"]): rank for rank in ranks}
        self._lives = {key: life for key, life in self._lives.items() if key in by_key}
        named = set(sorted(by_key, key=lambda key: not by_key[key]["connected"])[:_LABELLED_MAX])
        for key, rank in by_key.items():
            if not (rank["counters"] or rank["connected"] or key in self._lives):
                continue
            name = _text(key) if key in named else _OTHERS
            gauge: Series = "rank_connected", (self._node, *name)
            made.gauges[gauge] = made.gauges.get(gauge, 0.0) + bool(rank["connected"])
            if len(self._labels) < _LABELLED_MAX:
                self._labels.setdefault(key, _text(key))
            labels = (self._node, *self._labels.get(key, _OTHERS))
            life = self._lives.setdefault(key, _Life())
            if rank["counters"]:
                self._note(life, rank["counters"], now)
            if totals := totals_of(life.counters, labels):
                source, before = (*key, life.number), life.counted_before
                made.totals.append(Totals(source=source, totals=totals, counted_before=before))
        return made

    def _note(self, life: _Life, counters: Mapping[str, int], now: float) -> None:
        uptime_s = counters.get("uptime_s", 0)
        if not life.counters:
            # Counters that are older than this process were exported by the one before.
            life.counted_before = uptime_s > now - self._began + _SLACK_S
        elif uptime_s < life.counters.get("uptime_s", 0):
            life.number, life.counted_before = life.number + 1, False
        life.counters = counters


def _text(key: RankKey) -> tuple[str, str]:
    """Return a rank's labels; the name of its replica may be any text."""
    return key[0].encode("utf-8", "replace").decode()[:_NAME_MAX], str(key[1])


def totals_of(counters: Mapping[str, int], labels: tuple[str, ...] = ()) -> dict[Series, float]:
    """Return the totals of declared metrics among a rank's counters; others are left out."""
    placed = read_status("rank", counters, labels).totals
    totals = {series: total for one in placed for series, total in one.totals.items()}
    for prefix, (metric, reasons) in _REASONS.items():
        for name in counters:
            if name.startswith(prefix):
                reason = name.removeprefix(prefix)
                series = metric, (*labels, reason if reason in reasons else _OTHER)
                totals[series] = totals.get(series, 0.0) + counters[name]
    found: dict[str, dict[float, int]] = {}
    for name, value in counters.items():
        if match := _BUCKET.fullmatch(name):
            buckets = found.setdefault(match[1], dict.fromkeys(_BOUNDS_NS, 0))
            # A bound that is none of these counts in the next larger one.
            buckets[min(one for one in _BOUNDS_NS if one >= float(match[2]))] += value
    for noun, buckets in found.items():
        below = 0  # Prometheus's buckets are cumulative
        for bound, count in buckets.items():
            below += count
            totals[f"{noun}_seconds_bucket_total", (*labels, _le(bound))] = below
        totals[f"{noun}_count_total", labels] = below
        totals[f"{noun}_seconds_sum_total", labels] = counters.get(f"{noun}_us_sum", 0) / 1e6
    return totals


def _le(bound_ns: float) -> str:
    return "+Inf" if bound_ns == float("inf") else f"{bound_ns / 1e9:.9f}".rstrip("0")
