"""The counters of a node's ranks, as totals of declared metrics; pure.

A rank's counters come with its reports. They start over with its process; after a restart of the
shard they are older than the shard's. The counter `uptime_s` tells which of the two it is.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.telemetry.figures import Figures, Series, Totals
from kvray.metrics import LATENCIES
from kvray.trace.reasons import DROP_PREFIX, MISS_PREFIX, MISS_REASONS, DropReason

RankKey = tuple[str, int]

_LABELLED_MAX = 128
"""Ranks that have labels of their own; Ray keeps a counter's labels for ever."""
OTHER = "other"
_OTHERS = OTHER, "0"
_NAME_MAX = 64
_SLACK_S = 3.0
"""By how much a rank's `uptime_s` is behind: reports come once a second."""

_REASONS = {
    DROP_PREFIX: ("unsaved_blocks_total", [reason.value for reason in DropReason]),
    MISS_PREFIX: ("miss_tokens_total", MISS_REASONS),
}
_SERIES: Mapping[str, Series] = {
    **{
        name: (f"{name}_total", ())
        for name in ("requests", "bypassed_requests", "prompt_tokens", "stored_tokens", "errors")
    },
    "local_tokens": ("own_tokens_total", ()),
    **{
        f"{action}_blocks": ("engine_blocks_total", (action,))
        for action in ("loaded", "stored", "existing", "dropped")
    },
    "hit_tokens_from_host": ("hit_tokens_total", ("host", "none")),
    "hit_tokens_from_nvme": ("hit_tokens_total", ("nvme", "none")),
    "hit_tokens_from_nixl": ("hit_tokens_total", ("remote", "nixl")),
    "hit_tokens_from_object_ref": ("hit_tokens_total", ("remote", "object_ref")),
    **{
        f"{prefix}{reason}": (metric, (reason,))
        for prefix, (metric, reasons) in _REASONS.items()
        for reason in reasons
    },
}
"""A rank's counter -> its metric and the labels beside the rank's."""
_BOUNDS_NS = (*(float(2**bits) for bits in range(15, 33)), float("inf"))
"""Where the buckets of `kvray.engine.figures` end."""
_BUCKET = re.compile(rf"({'|'.join(LATENCIES)})_ns_below_(\d{{1,19}}|inf)")


@dataclass(slots=True)
class _Seen:
    life: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    counted_before: bool = False


class RankFigures:
    """Remembers how to tell one life of a rank from the next."""

    def __init__(self, node: str, now: float) -> None:
        """Start at `now`, the start of the shard's process on `node`."""
        self._node = node
        self._began = now
        self._seen: dict[RankKey, _Seen] = {}
        self._labels: dict[RankKey, tuple[str, str]] = {}

    def look(self, ranks: Iterable[Mapping[str, Any]], now: float) -> Figures:
        """Return the figures of `ranks`, as `Replicas.status` gives them; others are forgotten.

        A rank that has registered again, and not reported since, keeps its totals. Ray forgets a
        gauge and keeps a counter's labels for ever. So every connected rank has a gauge of its own,
        and only the first ranks have counters of their own.
        """
        made = Figures()
        by_key = {(rank["replica"], rank["rank"]): rank for rank in ranks}
        self._seen = {key: seen for key, seen in self._seen.items() if key in by_key}
        named = set(sorted(by_key, key=lambda key: not by_key[key]["connected"])[:_LABELLED_MAX])
        for key, rank in by_key.items():
            if not (rank["counters"] or rank["connected"] or key in self._seen):
                continue
            name = _text(key) if key in named else _OTHERS
            gauge: Series = "rank_connected", (self._node, *name)
            made.gauges[gauge] = made.gauges.get(gauge, 0.0) + bool(rank["connected"])
            labels = (self._node, *self._labels_of(key))
            if totals := self._totals(self._seen.setdefault(key, _Seen()), rank["counters"], now):
                seen = self._seen[key]
                made.totals.append(
                    Totals(
                        source=key,
                        life=seen.life,
                        counted_before=seen.counted_before,
                        totals={(its, (*labels, *own)): n for (its, own), n in totals.items()},
                    )
                )
        return made

    def _totals(self, seen: _Seen, counters: Mapping[str, int], now: float) -> dict[Series, float]:
        if counters:
            if not seen.counters:
                # Counters that are older than this process were exported by the one before.
                age_s = now - self._began + _SLACK_S
                seen.counted_before = counters.get("uptime_s", 0) > age_s
            elif counters.get("uptime_s", 0) < seen.counters.get("uptime_s", 0):
                seen.life += 1
            seen.counters = counters
        return totals_of(seen.counters)

    def _labels_of(self, key: RankKey) -> tuple[str, str]:
        labels = self._labels.get(key)
        if labels is None:
            if len(self._labels) >= _LABELLED_MAX:
                return _OTHERS
            labels = self._labels[key] = _text(key)
        return labels


def _text(key: RankKey) -> tuple[str, str]:
    """Return a rank's labels; the name of its replica may be any text."""
    return key[0].encode("utf-8", "replace").decode()[:_NAME_MAX], str(key[1])


def totals_of(counters: Mapping[str, int]) -> dict[Series, float]:
    """Return the totals of declared metrics among a rank's counters; others are left out."""
    totals: dict[Series, float] = {}
    for name, value in counters.items():
        series = _SERIES.get(name)
        for prefix, (metric, _) in _REASONS.items():
            if series is None and name.startswith(prefix):
                series = metric, (OTHER,)
        if series is not None:
            totals[series] = totals.get(series, 0.0) + value
    return totals | _latencies(counters)


def _latencies(counters: Mapping[str, int]) -> dict[Series, float]:
    """Return cumulative buckets, as Prometheus has them."""
    found: dict[str, dict[float, int]] = {}
    for name, value in counters.items():
        if match := _BUCKET.fullmatch(name):
            buckets = found.setdefault(match[1], dict.fromkeys(_BOUNDS_NS, 0))
            # A bound that is none of these counts in the next larger one.
            buckets[min(one for one in _BOUNDS_NS if one >= float(match[2]))] += value
    totals: dict[Series, float] = {}
    for noun, buckets in found.items():
        below = 0
        for bound, count in buckets.items():
            below += count
            totals[f"{noun}_seconds_bucket_total", (_le(bound),)] = below
        totals[f"{noun}_count_total", ()] = below
        totals[f"{noun}_seconds_sum_total", ()] = counters.get(f"{noun}_us_sum", 0) / 1e6
    return totals


def _le(bound_ns: float) -> str:
    return "+Inf" if bound_ns == float("inf") else f"{bound_ns / 1e9:.9f}".rstrip("0")
