"""Every metric of the tier, declared once; `actors/` makes Ray's objects of this table.

Ray puts `ray_` before each name. Anybody who reaches the port may read it: no label may come from
a prompt, a key or a salt. Latencies are counters too, one a bucket with the label `le`, since Ray's
histograms do not sum exactly; `histogram_quantile` takes them.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

PREFIX = "kvray_"
TIER_LABEL = "cluster_name"
"""A label of every metric, beside its own: tiers may share a Ray cluster and a node."""

_Kind = Literal["counter", "gauge"]
_RANK = ("node", "replica", "rank")


class Metric(NamedTuple):
    """One metric."""

    name: str
    """`kvray_<noun>_<unit>`, and `_total` for a counter; Ray puts `ray_` before it."""
    kind: _Kind
    help: str
    labels: tuple[str, ...]


LATENCIES = {
    "lease": "leasing a prefix in the node's arena",
    "stage": "waiting for the shard to bring blocks of other nodes or of the disk",
    "match": "the engine's thread in the connector for a request (leader time)",
    "plan": "the engine's thread in the connector for a pass (leader time)",
}
"""Latency that engines measure -> its meaning; each has what makes a histogram of exact counts."""

FIRST_TOKENS = {
    "first_token": "from a router's choice of a replica to the request's first token",
    "first_token_error": "by how much that time differed from its prediction, either way",
}
"""What routers measure, each with what makes a histogram."""

_HELPS: Mapping[tuple[_Kind, tuple[str, ...]], Mapping[str, str]] = {
    # -- what the engines say: figures of a rank, through its node's shard
    ("counter", _RANK): {
        "requests": "requests that were looked up",
        "bypassed_requests": "requests that the cache was not asked about (no identity)",
        "prompt_tokens": "tokens of the prompts that were looked up",
        "own_tokens": "prompt tokens that the engine had in its own pool",
        "stored_tokens": "tokens stored through the tensor API",
        "errors": "errors that the engine was kept from; each cause is in its log once",
        **{f"{noun}_seconds_sum": f"{text}: seconds" for noun, text in LATENCIES.items()},
        **{f"{noun}_count": f"{text}: how many" for noun, text in LATENCIES.items()},
    },
    ("counter", (*_RANK, "tier", "transport")): {
        "hit_tokens": "prompt tokens that were promised, by where their blocks came from",
    },
    ("counter", (*_RANK, "reason")): {
        "miss_tokens": "prompt tokens not found, by reason",
        "unsaved_blocks": "blocks that an engine computed and did not store, by reason",
    },
    ("counter", (*_RANK, "action")): {
        "engine_blocks": "blocks that an engine loaded, stored, found stored, or dropped",
    },
    ("counter", (*_RANK, "le")): {
        f"{noun}_seconds_bucket": f"{text}: how many took <= le" for noun, text in LATENCIES.items()
    },
    ("gauge", _RANK): {"rank_connected": "1 while the rank is connected to its shard"},
    # -- what a shard says of its node
    ("gauge", ("node",)): {
        "shard_serving": "1 while the shard serves, 0 while it starts or ends",
        "shard_epoch": "how often the node's arena was adopted: one more a restart",
        "leased_blocks": "blocks of the arena that somebody has leased",
        "quarantined_blocks": "blocks of the arena that are never served again",
        "holders": "processes attached to the arena",
        "draining": "1 while the node is to go, else 0",
        "drain_left_bytes": "bytes that the node is still to give to others before it goes",
        "copied_bytes": "bytes of blocks that are extra: another node has them too",
        "announcement_lag_seconds": "age of the oldest change that the lookup was not told of",
        "nvme_write_budget_bytes": "bytes that may be written to disk now; none without a budget",
        "nvme_failed": "1 while the disk is out or does not answer",
    },
    ("gauge", ("node", "tier")): {
        "capacity_bytes": "bytes that the tier may have",
        "resident_blocks": "blocks in the tier",
    },
    ("gauge", ("node", "tier", "namespace")): {
        "resident_bytes": "bytes of blocks, of each namespace",
    },
    ("gauge", ("node", "namespace", "memory")): {
        "expected_hit_ratio": "share of prompt tokens that would hit with so many times the memory",
        "expected_hit_error": "standard error of that share, as it is of a sample",
    },
    ("gauge", ("node", "namespace")): {
        "quota_bytes": "bytes of the arena that a namespace may have",
    },
    ("counter", ("node", "tier")): {
        "stored_blocks": "blocks that became findable in the tier",
        "evicted_blocks": "blocks that left the tier for others",
        "dropped_blocks": "blocks that were not stored for want of room",
        "corrupt_blocks": "blocks whose bytes were wrong; tier staging: on their way here",
    },
    ("counter", ("node",)): {
        "demoted_blocks": "blocks written from memory to disk",
        "promoted_blocks": "blocks read from disk into memory",
        "refused_blocks": "blocks that left memory and were not worth a write",
        "over_quota_blocks": "blocks evicted because their namespace was over its quota",
        "repairs": "repairs of the arena's tables after a process died in them",
        "stages": "prefixes that engines had brought to this node",
        "late_stages": "stages that took longer than the engine waited",
        "refused_stages": "stages that were refused because there were too many",
        "announcements": "changes that the lookup has taken, by batch",
        "announcement_seconds": "from noting a batch's oldest change to its being taken; sum",
        "nvme_written_bytes": "bytes written to disk, tables included",
        "nvme_read_bytes": "bytes read from disk, tables included",
        "nvme_postponed_rounds": "rounds of demotion put off because the budget was used up",
    },
    ("counter", ("node", "transport", "direction")): {
        "moved_bytes": "bytes of blocks that came here (in) or went (out), by transport",
    },
    # -- what lookup and supervisor say of the cluster
    ("gauge", ("partition",)): {
        "lookup_keys": "different blocks that a partition of the lookup knows",
        "lookup_entries": "blocks that it knows, counted at every holder",
        "lookup_bytes": "memory of its index",
    },
    ("gauge", ()): {
        "silent_shards": "shards that the lookup has not heard of for too long",
    },
    ("counter", ("partition",)): {
        "lookup_queries": "questions of shards: who has these blocks",
        "lookup_queried_blocks": "blocks that were asked for",
        "lookup_resyncs": "announcements that did not follow the last one",
    },
    ("gauge", ("part",)): {
        "parts": "parts of the tier that there should be: shard, mover, lookup",
        "answering_parts": "how many of them answer",
    },
    # -- what the routers of Ray Serve say, from the processes of its ingresses
    ("counter", ("reason",)): {
        "routed_requests": "requests that a router sent to a replica: prefix, queue or fallback",
    },
    ("counter", ("outcome",)): {
        "router_surveys": "questions of routers where a prompt is: answered, failed or skipped",
        "pool_event_batches": "batches of engines' KV events that routers took (applied), times"
        " that some were missing (gap), and that they stayed so (lost)",
    },
    ("counter", ()): {
        **{f"{noun}_seconds_sum": f"{text}: seconds" for noun, text in FIRST_TOKENS.items()},
        **{f"{noun}_count": f"{text}: how many" for noun, text in FIRST_TOKENS.items()},
        "predicted_first_token_seconds_sum": "predicted times to those first tokens: seconds",
    },
    ("counter", ("le",)): {
        f"{noun}_seconds_bucket": f"{text}: how many took <= le"
        for noun, text in FIRST_TOKENS.items()
    },
    ("counter", ("part",)): {
        "outages": "times that a part stopped answering",
        "ended_parts": "frozen parts that were ended, to be restarted",
    },
}


def _metric(kind: _Kind, labels: tuple[str, ...], name: str, text: str) -> Metric:
    return Metric(f"{PREFIX}{name}{'_total' if kind == 'counter' else ''}", kind, text, labels)


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for (kind, labels), helps in _HELPS.items()
    for metric in (_metric(kind, labels, name, text) for name, text in helps.items())
}
"""Every metric, by its name."""
