"""The counters of a node's ranks, as totals of declared metrics; pure.

A rank's counters come with its reports. They start over with its process, and are older than the
shard's process after a restart of the shard; which of the two it is, `uptime_s` among them tells.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.trace.reasons import DROP_PREFIX, MISS_PREFIX, MISS_REASONS, DropReason

Series = tuple[str, tuple[str, ...]]
"""A metric's name without `kvray_`, and the values of its labels."""
RankKey = tuple[str, int]

_LABELLED_MAX = 128
"""Ranks that have labels of their own; Ray keeps a counter's labels for ever."""
_OTHER = "other"
_OTHERS = _OTHER, "0"
_NAME_MAX = 64
_SETTLE_S = 6.0
"""A `not_stored` miss may get another reason some reports later."""
_SLACK_S = 3.0
"""By how much a rank's `uptime_s` is behind: reports come once a second."""

_PLAIN = {
    "requests": "requests_total",
    "bypassed_requests": "bypassed_requests_total",
    "prompt_tokens": "prompt_tokens_total",
    "local_tokens": "own_tokens_total",
    "stored_tokens": "stored_tokens_total",
    "errors": "errors_total",
}
_ACTIONS = {
    "loaded_blocks": "loaded",
    "stored_blocks": "stored",
    "existing_blocks": "existing",
    "dropped_blocks": "dropped",
}
_WAYS = {
    "hit_tokens_from_host": ("host", "none"),
    "hit_tokens_from_nvme": ("nvme", "none"),
    "hit_tokens_from_nixl": ("remote", "nixl"),
    "hit_tokens_from_object_ref": ("remote", "object_ref"),
}
_DROP_REASONS = frozenset(reason.value for reason in DropReason)
_UNSETTLED: Series = ("miss_tokens_total", ("not_stored",))
_BOUNDS_NS = (*(float(2**bits) for bits in range(15, 33)), float("inf"))
"""Where the buckets of `kvray.connector.figures.call_times` end."""
_BUCKET = re.compile(r"(lease|stage|match|plan)_ns_below_(\d{1,19}|inf)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """One rank's totals; `source`, `life` and `counted_before` are for `Increments`."""

    source: RankKey
    life: int
    counted_before: bool
    totals: Mapping[Series, float]
    """Series with all labels but the node's."""
    is_connected: bool
    labels: tuple[str, str]
    """Of its totals, which Ray keeps for ever: the ranks after the first so many share theirs."""
    name: tuple[str, str]
    """Labels of its gauges, which Ray forgets."""


@dataclass(slots=True)
class _Seen:
    life: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    counted_before: bool = False
    unsettled: deque[tuple[float, float]] = field(default_factory=deque)


class RankFigures:
    """Remembers how to tell one life of a rank from the next."""

    def __init__(self, now: float) -> None:
        """Start at `now`, the start of the shard's process."""
        self._began = now
        self._adopted = False
        self._seen: dict[RankKey, _Seen] = {}
        self._labels: dict[RankKey, tuple[str, str]] = {}

    def note_adoption(self) -> None:
        """The arena is older than this process: ranks that do not say their age may be too."""
        self._adopted = True

    def look(self, ranks: Iterable[Mapping[str, Any]], now: float) -> list[RankTotals]:
        """Return the totals of `ranks`, as `Replicas.status` gives them; others are forgotten.

        One that has registered again, and not reported since, has the totals that it had; one that
        has never reported has none.
        """
        by_key = {(rank["replica"], rank["rank"]): rank for rank in ranks}
        self._seen = {key: seen for key, seen in self._seen.items() if key in by_key}
        named = set(sorted(by_key, key=lambda key: not by_key[key]["connected"])[:_LABELLED_MAX])
        return [
            self._look_at(key, rank, now, name=_text(key) if key in named else _OTHERS)
            for key, rank in by_key.items()
            if rank["counters"] or rank["connected"] or key in self._seen
        ]

    def _look_at(
        self, key: RankKey, rank: Mapping[str, Any], now: float, *, name: tuple[str, str]
    ) -> RankTotals:
        counters: Mapping[str, int] = rank["counters"]
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen()
        if counters:
            if not seen.counters:
                seen.counted_before = self._is_older(counters, now)
            elif _has_started_over(seen.counters, counters):
                seen.life += 1
                seen.unsettled.clear()
            seen.counters = counters
        totals = totals_of(seen.counters)
        if _UNSETTLED in totals:
            totals[_UNSETTLED] = self._settled(seen, totals[_UNSETTLED], now)
        return RankTotals(
            source=key,
            life=seen.life,
            counted_before=seen.counted_before,
            totals=totals,
            is_connected=bool(rank["connected"]),
            labels=self._labels_of(key),
            name=name,
        )

    def _is_older(self, counters: Mapping[str, int], now: float) -> bool:
        if "uptime_s" in counters:
            return counters["uptime_s"] > now - self._began + _SLACK_S
        return self._adopted

    def _settled(self, seen: _Seen, total: float, now: float) -> float:
        """Return the least total of the last `_SETTLE_S`, which will not fall again."""
        if not seen.unsettled and not seen.counted_before:
            seen.unsettled.append((now, 0.0))
        seen.unsettled.append((now, total))
        while len(seen.unsettled) > 1 and seen.unsettled[1][0] <= now - _SETTLE_S:
            seen.unsettled.popleft()
        return min(value for _, value in seen.unsettled)

    def _labels_of(self, key: RankKey) -> tuple[str, str]:
        labels = self._labels.get(key)
        if labels is None:
            if len(self._labels) >= _LABELLED_MAX:
                return _OTHERS
            labels = self._labels[key] = _text(key)
        return labels


def _text(key: RankKey) -> tuple[str, str]:
    """Return a rank's labels; its replica's name may be any text."""
    return key[0].encode("utf-8", "replace").decode()[:_NAME_MAX], str(key[1])


def totals_of(counters: Mapping[str, int]) -> dict[Series, float]:
    """Return the totals of declared metrics among a rank's counters; others are left out."""
    totals: dict[Series, float] = {}
    for name, value in counters.items():
        if name in _PLAIN:
            totals[_PLAIN[name], ()] = value
        elif name in _ACTIONS:
            totals["engine_blocks_total", (_ACTIONS[name],)] = value
        elif name in _WAYS:
            totals["hit_tokens_total", _WAYS[name]] = value
        elif name.startswith(DROP_PREFIX):
            reason = name.removeprefix(DROP_PREFIX)
            series = "unsaved_blocks_total", (reason if reason in _DROP_REASONS else _OTHER,)
            totals[series] = totals.get(series, 0.0) + value
        elif name.startswith(MISS_PREFIX):
            reason = name.removeprefix(MISS_PREFIX)
            series = "miss_tokens_total", (reason if reason in MISS_REASONS else _OTHER,)
            totals[series] = totals.get(series, 0.0) + value
    return totals | _latencies(counters)


def _latencies(counters: Mapping[str, int]) -> dict[Series, float]:
    """Return cumulative buckets, as Prometheus has them."""
    found: dict[str, dict[float, int]] = {}
    for name, value in counters.items():
        if match := _BUCKET.fullmatch(name):
            buckets = found.setdefault(match[1], dict.fromkeys(_BOUNDS_NS, 0))
            # One of other bounds, from an engine of another version, is in the next larger one.
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


def _has_started_over(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    if "uptime_s" in before and "uptime_s" in now:
        return now["uptime_s"] < before["uptime_s"]
    return any(value < before.get(name, 0) for name, value in now.items())
