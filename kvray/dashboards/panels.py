"""The panels of the dashboard: what each shows, and the PromQL that asks for it."""

from dataclasses import dataclass

RATE = "$__rate_interval"
"""Grafana's window: long enough for two scrapes."""

_NODE = 'node=~"$node"'
_RANK = 'node=~"$node",replica=~"$replica"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: expressions and what their lines are called."""

    title: str
    unit: str
    """As Grafana names units."""
    queries: tuple[tuple[str, str], ...]
    """(expression, legend)."""
    help: str = ""
    is_stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row of panels."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, labels: str, *, by: str = "") -> str:
    by = f" by ({by})" if by else ""
    return f"sum{by}(rate(ray_kvray_{metric}{{{labels}}}[{RATE}]))"


def _sum(metric: str, labels: str, *, by: str) -> str:
    return f"sum by ({by})(ray_kvray_{metric}{{{labels}}})"


def _max(metric: str, labels: str, *, by: str) -> str:
    return f"max by ({by})(ray_kvray_{metric}{{{labels}}})"


def _share_of_hits(labels: str, *, by: str = "") -> str:
    hits, misses = (
        _rate("hit_tokens_total", labels, by=by),
        _rate("miss_tokens_total", labels, by=by),
    )
    return f"{hits} / ({hits} + {misses})"


def _quantile(quantile: float, noun: str) -> str:
    buckets = _rate(f"{noun}_seconds_bucket_total", _RANK, by="le")
    return f"histogram_quantile({quantile}, {buckets})"


def _latency(noun: str, title: str, text: str) -> Panel:
    return Panel(
        title=title,
        unit="s",
        help=text,
        queries=((_quantile(0.5, noun), "half below"), (_quantile(0.99, noun), "99 % below")),
    )


HITS = Group(
    title="Hit rate",
    panels=(
        Panel(
            title="Share of the tokens asked for that were hits",
            unit="percentunit",
            maximum=1.0,
            help="Of the prompt tokens that the engine did not have itself and that fill blocks.",
            queries=(
                (_share_of_hits(_RANK), "all"),
                (_share_of_hits(_RANK, by="replica"), "{{replica}}"),
            ),
        ),
        Panel(
            title="Hit tokens per second, by where they came from",
            unit="short",
            is_stacked=True,
            help="host: they were in the node's memory. nvme: on its disk. remote: another node's.",
            queries=(
                (
                    _rate("hit_tokens_total", _RANK, by="tier, transport"),
                    "{{tier}} {{transport}}",
                ),
            ),
        ),
        Panel(
            title="Prompt tokens per second",
            unit="short",
            queries=(
                (_rate("prompt_tokens_total", _RANK), "asked for"),
                (_rate("own_tokens_total", _RANK), "in the engine's own pool"),
            ),
        ),
    ),
)

MISSES = Group(
    title="Misses by reason",
    panels=(
        Panel(
            title="Missed tokens per second, by reason",
            unit="short",
            is_stacked=True,
            help="docs/metrics.md says what each reason means.",
            queries=((_rate("miss_tokens_total", _RANK, by="reason"), "{{reason}}"),),
        ),
        Panel(
            title="Requests per second",
            unit="reqps",
            queries=(
                (_rate("requests_total", _RANK, by="replica"), "{{replica}}"),
                (_rate("bypassed_requests_total", _RANK) + " or vector(0)", "bypassed"),
            ),
        ),
    ),
)

BYTES = Group(
    title="Bytes by tier",
    panels=(
        Panel(
            title="Resident, and capacity",
            unit="bytes",
            queries=(
                (_sum("resident_bytes", _NODE, by="tier"), "{{tier}} resident"),
                (_sum("capacity_bytes", _NODE, by="tier"), "{{tier}} capacity"),
            ),
        ),
        Panel(
            title="Resident, by namespace",
            unit="bytes",
            is_stacked=True,
            help="The first digits of a namespace's digest, as `kvray status` shows them.",
            queries=(
                (
                    _sum("resident_bytes", _NODE, by="namespace, tier"),
                    "{{tier}} {{namespace}}",
                ),
            ),
        ),
        Panel(
            title="Moved per second, by transport",
            unit="Bps",
            help="in: to this node's memory. out: from it, to other nodes or its disk.",
            queries=(
                (
                    _rate("moved_bytes_total", _NODE, by="transport, direction"),
                    "{{transport}} {{direction}}",
                ),
            ),
        ),
    ),
)

LATENCIES = Group(
    title="Latencies",
    panels=(
        _latency("lease", "Lease", "Finding and leasing a prefix in the node's memory."),
        _latency("stage", "Stage", "Waiting for the shard; bounded by connector.stage_wait_s."),
        _latency("match", "Leader, for a request", "The engine's thread in the connector."),
        _latency("plan", "Leader, for a pass", "The engine's thread in the connector."),
        Panel(
            title="Share of its time that the leader spends in the connector",
            unit="percentunit",
            queries=(
                (
                    f"{_rate('match_seconds_sum_total', _RANK, by='replica')}"
                    f" + {_rate('plan_seconds_sum_total', _RANK, by='replica')}",
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            title="Late stages",
            unit="percentunit",
            help="Share of the stages that took longer than the engine waited.",
            queries=(
                (
                    f"{_rate('late_stages_total', _NODE, by='node')}"
                    f" / {_rate('stages_total', _NODE, by='node')}",
                    "{{node}}",
                ),
            ),
        ),
    ),
)

EVICTIONS = Group(
    title="Stores and evictions",
    panels=(
        Panel(
            title="Blocks per second, by tier",
            unit="short",
            queries=tuple(
                (_rate(f"{what}_blocks_total", _NODE, by="tier"), f"{{{{tier}}}} {what}")
                for what in ("stored", "evicted", "dropped")
            ),
        ),
        Panel(
            title="Between memory and disk, blocks per second",
            unit="short",
            queries=tuple(
                (_rate(f"{what}_blocks_total", _NODE), what)
                for what in ("demoted", "promoted", "refused", "over_quota")
            ),
        ),
        Panel(
            title="What engines do, blocks per second",
            unit="short",
            help="existing: they were stored already. dropped: there was no room.",
            queries=((_rate("engine_blocks_total", _RANK, by="action"), "{{action}}"),),
        ),
    ),
)

HEALTH = Group(
    title="Health",
    panels=(
        Panel(
            title="Parts that answer, and that there should be",
            unit="short",
            queries=(
                (_max("answering_parts", "", by="part"), "{{part}} answering"),
                (_max("parts", "", by="part"), "{{part}} wanted"),
            ),
        ),
        Panel(
            title="Outages, and frozen parts that were ended, in 10 minutes",
            unit="short",
            queries=(
                ("sum by (part)(increase(ray_kvray_outages_total[10m]))", "{{part}} outages"),
                ("sum by (part)(increase(ray_kvray_ended_parts_total[10m]))", "{{part}} ended"),
            ),
        ),
        Panel(
            title="Corrupt blocks in 10 minutes",
            unit="short",
            help="They were never served. Any is reason to look at memory, disk and network.",
            queries=(
                (
                    "sum by (node, tier)"
                    f"(increase(ray_kvray_corrupt_blocks_total{{{_NODE}}}[10m]))",
                    "{{node}} {{tier}}",
                ),
            ),
        ),
        Panel(
            title="Announcement lag",
            unit="s",
            help="How old the oldest change is that the lookup does not know of.",
            queries=(
                (_max("announcement_lag_seconds", _NODE, by="node"), "{{node}} now"),
                (
                    f"{_rate('announcement_seconds_total', _NODE)}"
                    f" / {_rate('announcements_total', _NODE)}",
                    "mean",
                ),
            ),
        ),
        Panel(
            title="Ranks, holders, silent shards",
            unit="short",
            queries=(
                (_sum("rank_connected", _RANK, by="node"), "{{node}} ranks"),
                (_max("holders", _NODE, by="node"), "{{node}} holders"),
                ("max(ray_kvray_silent_shards)", "silent shards"),
            ),
        ),
        Panel(
            title="Blocks leased, quarantined, spare",
            unit="short",
            queries=tuple(
                (_sum(f"{what}_blocks", _NODE, by="node"), f"{{{{node}}}} {what}")
                for what in ("leased", "quarantined", "spare")
            ),
        ),
        Panel(
            title="Lookup",
            unit="short",
            queries=(
                ("max(ray_kvray_lookup_keys)", "blocks known"),
                ("sum(rate(ray_kvray_lookup_queries_total[$__rate_interval]))", "queries/s"),
                ("sum(increase(ray_kvray_lookup_resyncs_total[10m]))", "resyncs in 10 minutes"),
            ),
        ),
        Panel(
            title="Restarts: how often an arena was adopted",
            unit="short",
            queries=((_max("shard_epoch", _NODE, by="node"), "{{node}}"),),
        ),
    ),
)

NVME = Group(
    title="NVMe",
    panels=(
        Panel(
            title="Written and read per second",
            unit="Bps",
            queries=(
                (_rate("nvme_written_bytes_total", _NODE, by="node"), "{{node}} written"),
                (_rate("nvme_read_bytes_total", _NODE, by="node"), "{{node}} read"),
            ),
        ),
        Panel(
            title="Left of the write budget",
            unit="bytes",
            help="Empty without nvme.write_gib_per_day.",
            queries=((_max("nvme_write_budget_bytes", _NODE, by="node"), "{{node}}"),),
        ),
        Panel(
            title="Failed, and rounds put off for the budget in 10 minutes",
            unit="short",
            queries=(
                (_max("nvme_failed", _NODE, by="node"), "{{node}} failed"),
                (
                    "sum by (node)"
                    f"(increase(ray_kvray_nvme_postponed_rounds_total{{{_NODE}}}[10m]))",
                    "{{node}} put off",
                ),
            ),
        ),
    ),
)

GROUPS = (HITS, MISSES, BYTES, LATENCIES, EVICTIONS, HEALTH, NVME)
"""The rows of the dashboard."""
