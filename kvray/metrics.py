"""Every metric of the tier, declared once, with its place in the statuses that have it.

`actors/` makes Ray's objects of this table; `kvray status` and the page read their figures by it.
Ray puts `ray_` before each name. Anybody who reaches the port may read it: no label may come from
a prompt, a key or a salt. Latencies are counters too, one a bucket with the label `le`, since Ray's
histograms do not sum exactly; `histogram_quantile` takes them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

PREFIX = "kvray_"
TIER_LABEL = "cluster_name"
"""A label of every metric, beside its own: tiers may share a Ray cluster and a node."""

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

# A section names the part whose status has the figures, and their labels. A line is a metric's
# name, its help and, behind the @, where the status has it; where labels are not the part's own,
# their values stand before each place. A figure without a place is counted for the metric alone.
_TABLE = """
[rank] node replica rank
requests_total: requests that were looked up @ requests
bypassed_requests_total: requests that the cache was not asked about (no identity)
  @ bypassed_requests
prompt_tokens_total: tokens of the prompts that were looked up @ prompt_tokens
own_tokens_total: prompt tokens that the engine had in its own pool @ local_tokens
stored_tokens_total: tokens stored through the tensor API @ stored_tokens
errors_total: errors that the engine was kept from; each cause is in its log once @ errors
rank_connected: 1 while the rank is connected to its shard

[rank] node replica rank tier transport
hit_tokens_total: prompt tokens that were promised, by where their blocks came from
  @ host,none=hit_tokens_from_host nvme,none=hit_tokens_from_nvme
  remote,nixl=hit_tokens_from_nixl remote,object_ref=hit_tokens_from_object_ref

[rank] node replica rank reason
miss_tokens_total: prompt tokens not found, by reason
unsaved_blocks_total: blocks that an engine computed and did not store, by reason

[rank] node replica rank action
engine_blocks_total: blocks that an engine loaded, stored, found stored, or dropped
  @ loaded=loaded_blocks stored=stored_blocks existing=existing_blocks dropped=dropped_blocks

[shard] node
shard_serving: 1 while the shard serves, 0 while it starts or ends
shard_epoch: how often the node's arena was adopted: one more a restart @ arena.shard_epoch
taken_bytes: bytes of the arena that slots with blocks take @ arena.taken_bytes
leased_blocks: blocks of the arena that somebody has leased @ arena.leased_blocks
quarantined_blocks: blocks of the arena that are never served again @ arena.quarantined_blocks
holders: processes attached to the arena @ arena.holders
draining: 1 while the node is being drained, else 0
drain_left_bytes: bytes that the node is still to give to others before it goes
copied_bytes: bytes of blocks that are extra: another node has them too @ copies.extra_bytes
announcement_lag_seconds: age of the oldest change that the lookup was not told of
  @ announcements.lag_s
nvme_write_budget_bytes: bytes that may be written to disk now; none without a budget
  @ nvme.write_budget_bytes
nvme_failed: 1 while the disk is out or does not answer
demoted_blocks_total: blocks written from memory to disk @ nvme.demoted_blocks
promoted_blocks_total: blocks read from disk into memory @ nvme.promoted_blocks
refused_blocks_total: blocks that left memory and were not worth a write @ nvme.refused_blocks
over_quota_blocks_total: blocks evicted because their namespace was over its quota
  @ arena.over_quota
repairs_total: repairs of the arena's tables after a process died in them @ arena.repairs
stages_total: prefixes that engines had brought to this node @ staging.stages
late_stages_total: stages that took longer than the engine waited @ staging.late
refused_stages_total: stages that were refused because there were too many @ staging.refused
announcements_total: changes that the lookup has taken, by batch @ announcements.announcements
announcement_seconds_total: from noting a batch's oldest change to its being taken; sum
  @ announcements.seconds
nvme_written_bytes_total: bytes written to disk, tables included @ nvme.written_bytes
nvme_read_bytes_total: bytes read from disk, tables included @ nvme.read_bytes
nvme_postponed_rounds_total: rounds of demotion put off because the budget was used up
  @ nvme.postponed_rounds

[shard] node tier
capacity_bytes: bytes that the tier may have @ host=arena.capacity_bytes nvme=nvme.capacity_bytes
resident_blocks: blocks in the tier @ host=arena.blocks nvme=nvme.blocks
stored_blocks_total: blocks that became findable in the tier @ host=arena.stored nvme=nvme.stored
evicted_blocks_total: blocks that left the tier for others @ host=arena.evicted nvme=nvme.evicted
dropped_blocks_total: blocks not stored for want of room, or of the block before them
  @ host=arena.dropped nvme=nvme.dropped
corrupt_blocks_total: blocks whose bytes were wrong; tier staging: on their way here
  @ host=arena.corrupt nvme=nvme.corrupt staging=staging.corrupt_blocks

[shard] node tier namespace
resident_bytes: bytes of blocks, of each namespace

[shard] node namespace
quota_bytes: bytes of the arena that a namespace may have

[shard] node namespace memory
expected_hit_ratio: share of prompt tokens that would hit with so many times the memory
expected_hit_error: half of what that share may be off by

[shard] node transport direction
moved_bytes_total: bytes of blocks that came here (in) or went (out), by transport
  @ nixl,in=staging.transports.nixl.bytes object_ref,in=staging.transports.object_ref.bytes
  nvme,in=nvme.promoted_bytes nvme,out=nvme.demoted_bytes

[lookup] partition
lookup_keys: different blocks that a partition of the lookup knows @ keys
lookup_entries: blocks that it knows, counted at every holder @ entries
lookup_bytes: memory of its index @ bytes
lookup_queries_total: questions of shards: who has these blocks @ queries
lookup_queried_blocks_total: blocks that were asked for @ queried_blocks
lookup_resyncs_total: lists of all blocks that shards have begun @ resyncs

[lookup]
silent_shards: shards that the lookup has not heard of for too long

[supervisor] part
parts: parts of the tier that there should be: shard, mover, lookup
answering_parts: how many of them answer
outages_total: times that a part stopped answering
ended_parts_total: frozen parts that were ended, to be restarted

[router] reason
routed_requests_total: requests that a router sent to a replica: prefix, queue or fallback

[router] outcome
router_surveys_total: questions of routers where a prompt is: answered, failed or skipped
pool_event_batches_total: batches of engines' KV events that routers took (applied), times that some
  were missing (gap), and that they stayed so (lost)

[router]
predicted_first_token_seconds_sum_total: predicted times to those first tokens: seconds
"""


class Metric(NamedTuple):
    """One metric."""

    name: str
    """`kvray_<noun>_<unit>`, and `_total` for a counter; Ray puts `ray_` before it."""
    help: str
    labels: tuple[str, ...]
    part: str = ""
    places: Mapping[tuple[str, ...], str] = {}
    """Values of the last labels -> the figure's place in the part's status, dotted."""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """What Ray makes of it."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def read(self, status: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
        """Return the figures that a part's status has, by the values of the last labels."""
        found: dict[tuple[str, ...], float] = {}
        for own, place in self.places.items():
            value: Any = status
            for key in place.split("."):
                value = None if value is None else value.get(key)
            if value is not None:
                found[own] = value
        return found

    def is_one_of(self, own: tuple[str, ...], labels: Mapping[str, str]) -> bool:
        """Return whether the values of the last labels are `labels`, as far as it has them."""
        named = dict(zip(self.labels[-len(own) :], own, strict=False))
        return all(named.get(label, value) == value for label, value in labels.items())


def _declared() -> Iterator[Metric]:
    part = ""
    labels: tuple[str, ...] = ()
    for line in _TABLE.replace("\n  ", " ").splitlines():
        if line.startswith("["):
            part, *labels_there = re.findall(r"\w+", line)
            labels = tuple(labels_there)
        elif line:
            name, rest = line.split(": ", 1)
            text, _, places = rest.partition(" @ ")
            found = (re.split("[,=]", place) for place in places.split())
            where = {tuple(values): place for *values, place in found}
            yield Metric(PREFIX + name, text, labels, part, where)
    for nouns, labels in ((LATENCIES, ("node", "replica", "rank")), (FIRST_TOKENS, ())):
        for noun, text in nouns.items():
            name = PREFIX + noun
            yield Metric(f"{name}_seconds_sum_total", f"{text}: seconds", labels)
            yield Metric(f"{name}_count_total", f"{text}: how many", labels)
            yield Metric(
                f"{name}_seconds_bucket_total", f"{text}: how many took <= le", (*labels, "le")
            )


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _declared()}
"""Every metric, by its name."""


def places_of(name: str, **labels: str) -> tuple[str, ...]:
    """Return where a status has a metric's figures with these labels, as far as it has such."""
    metric = METRICS[PREFIX + name]
    return tuple(place for own, place in metric.places.items() if metric.is_one_of(own, labels))


def figure(status: Mapping[str, Any], name: str, **labels: str) -> float:
    """Return a metric's figure in a status, summed over labels that are not given; 0 without."""
    metric = METRICS[PREFIX + name]
    found = metric.read(status)
    return sum(value for own, value in found.items() if metric.is_one_of(own, labels))
