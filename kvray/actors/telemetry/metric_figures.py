"""The figures of shard, mover and lookup as values of declared metrics; pure.

They come from the statuses that `kvray status` shows, so that the two agree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvray.actors.names import MOVER_PREFIX, SHARD_PREFIX
from kvray.actors.telemetry.figures import Figures, Series, Totals
from kvray.actors.telemetry.rank_figures import OTHER, RankFigures
from kvray.metrics import METRICS, PREFIX

_NAMESPACES_MAX = 16
"""Namespaces that have labels of their own, among those that ranks have registered."""

_Rows = Mapping[Series, str]
"""A metric with its labels beside the node -> the figure's place in the status, dotted.

The first name of the place is the source that counts the totals.
"""


def _of_tier(tier: str, section: str) -> _Rows:
    kinds = ("stored", "evicted", "dropped", "corrupt")
    return {
        **{(f"{kind}_blocks_total", (tier,)): f"{section}.{kind}" for kind in kinds},
        ("capacity_bytes", (tier,)): f"{section}.capacity_bytes",
        ("resident_blocks", (tier,)): f"{section}.blocks",
    }


_SHARD: _Rows = {
    **_of_tier("host", "arena"),
    ("shard_epoch", ()): "arena.shard_epoch",
    ("leased_blocks", ()): "arena.leased_blocks",
    ("quarantined_blocks", ()): "arena.quarantined_blocks",
    ("holders", ()): "arena.holders",
    ("repairs_total", ()): "arena.repairs",
    ("over_quota_blocks_total", ()): "arena.over_quota",
    ("copied_bytes", ()): "copies.extra_bytes",
    ("announcement_lag_seconds", ()): "announcements.lag_s",
    ("announcements_total", ()): "announcements.announcements",
    ("announcement_seconds_total", ()): "announcements.seconds",
    ("stages_total", ()): "staging.stages",
    ("late_stages_total", ()): "staging.late",
    ("refused_stages_total", ()): "staging.refused",
    ("corrupt_blocks_total", ("staging",)): "staging.corrupt_blocks",
    # Blocks from the node's own disk are counted with the disk.
    ("moved_bytes_total", ("nixl", "in")): "staging.transports.nixl.bytes",
    ("moved_bytes_total", ("object_ref", "in")): "staging.transports.object_ref.bytes",
    **_of_tier("nvme", "nvme"),
    ("nvme_write_budget_bytes", ()): "nvme.write_budget_bytes",
    ("demoted_blocks_total", ()): "nvme.demoted_blocks",
    ("promoted_blocks_total", ()): "nvme.promoted_blocks",
    ("refused_blocks_total", ()): "nvme.refused_blocks",
    ("nvme_postponed_rounds_total", ()): "nvme.postponed_rounds",
    ("nvme_written_bytes_total", ()): "nvme.written_bytes",
    ("nvme_read_bytes_total", ()): "nvme.read_bytes",
    ("moved_bytes_total", ("nvme", "in")): "nvme.promoted_bytes",
    ("moved_bytes_total", ("nvme", "out")): "nvme.demoted_bytes",
}

_LOOKUP: _Rows = {
    ("lookup_keys", ()): "keys",
    ("lookup_entries", ()): "entries",
    ("lookup_bytes", ()): "bytes",
    ("lookup_queries_total", ()): "queries",
    ("lookup_queried_blocks_total", ()): "queried_blocks",
    ("lookup_resyncs_total", ()): "resyncs",
}


class ShardFigures:
    """Makes figures of a shard's status; remembers the namespaces and ranks in labels."""

    def __init__(self, shard: str, now: float) -> None:
        """Make those of `shard`, whose process started at `now`."""
        self._node = shard.removeprefix(SHARD_PREFIX)
        self._ranks = RankFigures(self._node, now)
        self._namespaces: set[str] = set()

    def of(self, status: Mapping[str, Any], now: float) -> Figures:
        """Return the figures of what `Shard.status` returned."""
        serving: Series = "shard_serving", (self._node,)
        if (arena := status.get("arena")) is None:
            return Figures({serving: float(status["state"] == "serving")})
        # The arena's tables count for as long as it is there, under however many shards.
        is_adopted = arena["shard_epoch"] > 1
        made = self._ranks.look(status["replicas"], now)
        own = _read(_SHARD, status, (self._node,), counted_before={"arena": is_adopted})
        made.gauges |= own.gauges | {serving: float(status["state"] == "serving")}
        made.totals += own.totals
        # Only registered namespaces are labels: the arena's ids may also stand for tenants.
        for name in status["namespaces"]:
            if len(self._namespaces) < _NAMESPACES_MAX:
                self._namespaces.add(name)
        made.gauges |= self._by_namespace("host", arena["namespaces"])
        for one in arena["namespaces"]:
            if one["quota_bytes"] is not None and one["namespace"] in self._namespaces:
                made.gauges["quota_bytes", (self._node, one["namespace"])] = one["quota_bytes"]
        made.gauges |= self._expected(status.get("traffic", {}))
        drain = status.get("drain")
        made.gauges["draining", (self._node,)] = float(drain is not None)
        made.gauges["drain_left_bytes", (self._node,)] = float((drain or {}).get("left_bytes", 0))
        if (nvme := status.get("nvme")) is not None:
            made.gauges |= self._by_namespace("nvme", nvme["namespaces"])
            made.gauges["nvme_failed", (self._node,)] = float(bool(nvme["message"]))
        return made

    def _by_namespace(self, tier: str, held: Iterable[Mapping[str, Any]]) -> dict[Series, float]:
        # An empty tier has none, and must show as empty.
        summed: Counter[str] = Counter({OTHER: 0})
        for one in held:
            name = one["namespace"] if one["namespace"] in self._namespaces else OTHER
            summed[name] += one["bytes"]
        return {("resident_bytes", (self._node, tier, name)): size for name, size in summed.items()}

    def _expected(self, traffic: Mapping[str, Any]) -> dict[Series, float]:
        """Return the curves of the namespaces that have labels, by memory in parts of today's."""
        made: dict[Series, float] = {}
        for name, one in traffic.get("namespaces", {}).items():
            if name not in self._namespaces:
                continue
            rows = zip(traffic["sizes"], one["host"], one["disk"], one["error"], strict=True)
            for size, host, disk, error in rows:
                labels = (self._node, name, f"{size / traffic['host_bytes']:.4g}")
                made["expected_hit_ratio", labels] = one["own"] + host + disk
                made["expected_hit_error", labels] = error
        return made


def mover_figures(mover: str, status: Mapping[str, Any]) -> Figures:
    """Return the figures of what `Mover.status` returned."""
    node = mover.removeprefix(MOVER_PREFIX)
    totals: dict[Series, float] = {
        ("moved_bytes_total", (node, transport, "out")): num_bytes
        for transport, num_bytes in status.get("sent_bytes", {}).items()
    }
    # A mover counts again when its shard has another arena.
    return Figures(totals=[Totals(source="sent", life=status.get("arena_id"), totals=totals)])


def lookup_figures(status: Mapping[str, Any], partition: int) -> Figures:
    """Return the figures of what `Lookup.status` returned; all partitions hear the same shards."""
    made = _read(_LOOKUP, status, (str(partition),))
    if not partition:
        made.gauges["silent_shards", ()] = len(status["silent"])
    return made


def _read(
    rows: _Rows,
    status: Mapping[str, Any],
    labels: tuple[str, ...],
    *,
    counted_before: Mapping[str, bool] | None = None,
) -> Figures:
    """Return the figures that `rows` find in a status; a missing one has no series."""
    gauges: dict[Series, float] = {}
    totals: dict[str, dict[Series, float]] = {}
    for (name, own), place in rows.items():
        value: Any = status
        for key in place.split("."):
            value = None if value is None else value.get(key)
        if value is None:
            continue
        is_gauge = METRICS[PREFIX + name].kind == "gauge"
        found = gauges if is_gauge else totals.setdefault(place.partition(".")[0], {})
        found[name, (*labels, *own)] = value
    before = counted_before or {}
    return Figures(
        gauges,
        [
            Totals(source=source, totals=its, counted_before=before.get(source, False))
            for source, its in totals.items()
        ],
    )
