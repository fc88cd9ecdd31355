"""The figures of shard, mover, lookup and supervisor as values of declared metrics; pure.

They are made of what the parts say of themselves in `kvray status`, so that the two agree.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.telemetry.rank_figures import RankFigures, Series

_NAMESPACES_MAX = 16
"""Namespaces that have labels of their own, among those that ranks have registered."""
_OTHER = "other"
_NODE_LETTERS = 12
"""Of a node's id, as `kvray status` shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one source; see `Increments.take`."""

    source: Hashable
    totals: Mapping[Series, float]
    life: Hashable = None
    counted_before: bool = False


@dataclass(slots=True)
class Figures:
    """Values of metrics, at one moment."""

    gauges: dict[Series, float] = field(default_factory=dict)
    totals: list[Totals] = field(default_factory=list)


class ShardFigures:
    """Makes figures of a shard's status; remembers which namespaces and ranks it has named."""

    def __init__(self, shard: str, now: float) -> None:
        """Make those of `shard`, whose process started at `now`."""
        self._node = shard.removeprefix("kvray-shard-")[:_NODE_LETTERS]
        self._ranks = RankFigures(now)
        self._namespaces: set[str] = set()

    def of(self, status: Mapping[str, Any], now: float) -> Figures:
        """Return the figures of what `Shard.status` returned."""
        made = Figures()
        node = (self._node,)
        made.gauges["shard_serving", node] = float(status["state"] == "serving")
        if (arena := status.get("arena")) is None:
            return made
        if arena["shard_epoch"] > 1:
            self._ranks.note_adoption()
        self._name(status["namespaces"])
        made.gauges |= self._arena_gauges(arena, status.get("duplicate_blocks", 0))
        announced = status["announcements"]
        made.gauges["announcement_lag_seconds", node] = announced["lag_s"]
        made.totals.append(Totals(source="announcements", totals=self._told(announced)))
        made.totals.append(
            Totals(
                source="arena",
                totals=self._arena_totals(arena),
                # Its tables count for as long as it is there, under however many shards.
                counted_before=arena["shard_epoch"] > 1,
            )
        )
        if "staging" in status:
            made.totals.append(Totals(source="staging", totals=self._staged(status["staging"])))
        if (nvme := status.get("nvme")) is not None:
            made.gauges |= self._nvme_gauges(nvme)
            made.totals.append(Totals(source="nvme", totals=self._nvme_totals(nvme)))
        self._add_ranks(status["replicas"], now, made)
        return made

    def _arena_gauges(self, arena: Mapping[str, Any], num_duplicates: int) -> dict[Series, float]:
        node = (self._node,)
        gauges: dict[Series, float] = {
            ("shard_epoch", node): arena["shard_epoch"],
            ("leased_blocks", node): arena["leased_blocks"],
            ("quarantined_blocks", node): arena["quarantined_blocks"],
            ("duplicate_blocks", node): num_duplicates,
            ("holders", node): arena["holders"],
            ("capacity_bytes", (*node, "host")): arena["capacity_bytes"],
            ("resident_blocks", (*node, "host")): arena["blocks"],
        }
        gauges |= self._by_namespace("host", arena["namespaces"])
        for one in arena["namespaces"]:
            if one["quota_bytes"] is not None and one["namespace"] in self._namespaces:
                gauges["quota_bytes", (*node, one["namespace"])] = one["quota_bytes"]
        return gauges

    def _arena_totals(self, arena: Mapping[str, Any]) -> dict[Series, float]:
        node = (self._node,)
        kinds = ("stored", "evicted", "dropped", "corrupt")
        return {
            **{(f"{kind}_blocks_total", (*node, "host")): arena[kind] for kind in kinds},
            ("repairs_total", node): arena["repairs"],
            ("over_quota_blocks_total", node): arena["over_quota"],
        }

    def _told(self, announced: Mapping[str, Any]) -> dict[Series, float]:
        node = (self._node,)
        return {
            ("announcements_total", node): announced["announcements"],
            ("announcement_seconds_total", node): announced["seconds"],
        }

    def _staged(self, staging: Mapping[str, Any]) -> dict[Series, float]:
        node = (self._node,)
        totals: dict[Series, float] = {
            ("stages_total", node): staging["stages"],
            ("late_stages_total", node): staging["late"],
            ("refused_stages_total", node): staging["refused"],
            ("corrupt_blocks_total", (*node, "staging")): staging["corrupt_blocks"],
        }
        for transport, counts in staging["transports"].items():
            # Blocks from the node's own disk are counted with the disk.
            if transport != "nvme":
                totals["moved_bytes_total", (*node, transport, "in")] = counts.get("bytes", 0)
        return totals

    def _nvme_gauges(self, nvme: Mapping[str, Any]) -> dict[Series, float]:
        node = (self._node,)
        gauges: dict[Series, float] = {
            ("capacity_bytes", (*node, "nvme")): nvme["capacity_bytes"],
            ("resident_blocks", (*node, "nvme")): nvme["blocks"],
            ("nvme_failed", node): float(bool(nvme["message"])),
        }
        gauges |= self._by_namespace("nvme", nvme["namespaces"])
        if nvme["write_budget_bytes"] is not None:
            gauges["nvme_write_budget_bytes", node] = nvme["write_budget_bytes"]
        return gauges

    def _nvme_totals(self, nvme: Mapping[str, Any]) -> dict[Series, float]:
        node = (self._node,)
        kinds = ("stored", "evicted", "dropped", "corrupt")
        return {
            **{(f"{kind}_blocks_total", (*node, "nvme")): nvme[kind] for kind in kinds},
            ("demoted_blocks_total", node): nvme["demoted_blocks"],
            ("promoted_blocks_total", node): nvme["promoted_blocks"],
            ("refused_blocks_total", node): nvme["refused_blocks"],
            ("nvme_postponed_rounds_total", node): nvme["postponed_rounds"],
            ("nvme_written_bytes_total", node): nvme["written_bytes"],
            ("nvme_read_bytes_total", node): nvme["read_bytes"],
            ("moved_bytes_total", (*node, "nvme", "in")): nvme["promoted_bytes"],
            ("moved_bytes_total", (*node, "nvme", "out")): nvme["demoted_bytes"],
        }

    def _name(self, registered: Iterable[str]) -> None:
        """Have these namespaces named in labels, as long as there are few.

        Only what ranks have registered: the arena's ids may also stand for tenants.
        """
        for name in registered:
            if len(self._namespaces) < _NAMESPACES_MAX:
                self._namespaces.add(name)

    def _by_namespace(self, tier: str, held: Iterable[Mapping[str, Any]]) -> dict[Series, float]:
        # An empty tier has none, and must show as empty.
        summed: Counter[str] = Counter({_OTHER: 0})
        for one in held:
            name = one["namespace"] if one["namespace"] in self._namespaces else _OTHER
            summed[name] += one["bytes"]
        return {("resident_bytes", (self._node, tier, name)): size for name, size in summed.items()}

    def _add_ranks(self, ranks: Iterable[Mapping[str, Any]], now: float, made: Figures) -> None:
        for one in self._ranks.look(ranks, now):
            labels = (self._node, *one.labels)
            connected: Series = "rank_connected", (self._node, *one.name)
            made.gauges[connected] = made.gauges.get(connected, 0.0) + one.is_connected
            if not one.totals:  # whether they were counted before is known with the first ones
                continue
            made.totals.append(
                Totals(
                    source=one.source,
                    life=one.life,
                    counted_before=one.counted_before,
                    totals={(name, (*labels, *own)): v for (name, own), v in one.totals.items()},
                )
            )


def mover_figures(mover: str, status: Mapping[str, Any]) -> Figures:
    """Return the figures of what `Mover.status` returned."""
    node = mover.removeprefix("kvray-mover-")[:_NODE_LETTERS]
    sent = status.get("sent_bytes", {})
    totals: dict[Series, float] = {
        ("moved_bytes_total", (node, transport, "out")): num_bytes
        for transport, num_bytes in sent.items()
    }
    # A mover counts again when its shard has another arena.
    return Figures(totals=[Totals(source="sent", life=status.get("arena_id"), totals=totals)])


def lookup_figures(status: Mapping[str, Any]) -> Figures:
    """Return the figures of what `Lookup.status` returned."""
    gauges: dict[Series, float] = {
        ("lookup_keys", ()): status["keys"],
        ("lookup_entries", ()): status["entries"],
        ("lookup_bytes", ()): status["bytes"],
        ("silent_shards", ()): len(status["silent"]),
    }
    totals: dict[Series, float] = {
        ("lookup_queries_total", ()): status["queries"],
        ("lookup_queried_blocks_total", ()): status["queried_blocks"],
        ("lookup_resyncs_total", ()): status["resyncs"],
    }
    return Figures(gauges=gauges, totals=[Totals(source="lookup", totals=totals)])
