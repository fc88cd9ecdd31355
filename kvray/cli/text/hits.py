"""Where prompt tokens came from, by the counters of replicas; the same in every command."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SOURCES = {
    "own pool": ("local_tokens",),
    "host": ("hit_tokens_from_host",),
    "disk": ("hit_tokens_from_nvme",),
    "remote": ("hit_tokens_from_nixl", "hit_tokens_from_object_ref"),
}
"""The counters of prompt tokens that were not computed: the engine had them itself, or the tier had
them in the node's memory, on its disk or on other nodes."""
COMPUTED = "computed"
"""All other prompt tokens."""


def ranks_of(shards: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ranks that shards know, connected or not."""
    return [rank for shard in shards for rank in shard.get("replicas", ())]


def ended_of(shards: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return each shard's sums of ranks that ended a while ago, if it has any."""
    return [shard["ended"] for shard in shards if shard.get("ended", {}).get("ranks")]


def total_counters(ranks: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the sums of all counters."""
    totals: Counter[str] = Counter()
    for rank in ranks:
        totals.update(rank["counters"])
    return totals


def token_sources(counters: Mapping[str, float]) -> dict[str, float]:
    """Return how many prompt tokens came from each source, and how many were computed."""
    found = {
        source: sum(counters.get(name, 0) for name in names) for source, names in SOURCES.items()
    }
    return {**found, COMPUTED: max(0, counters.get("prompt_tokens", 0) - sum(found.values()))}


def source_shares(counters: Mapping[str, float], *, digits: int = 0) -> dict[str, str]:
    """Return each source's share of the prompt tokens; empty texts if there were none."""
    prompt = counters.get("prompt_tokens", 0)
    return {
        source: f"{tokens / prompt:.{digits}%}" if prompt else ""
        for source, tokens in token_sources(counters).items()
    }


def sources_sentence(counters: Mapping[str, float]) -> str:
    """Return the shares as text; there must be prompt tokens."""
    return ", ".join(
        f"{source} {share}" for source, share in source_shares(counters, digits=1).items()
    )


def tier_share(counters: Mapping[str, float]) -> str:
    """Return the share of the prompt tokens that came from the tier; empty if there were none."""
    prompt = counters.get("prompt_tokens", 0)
    return f"{counters.get('hit_tokens', 0) / prompt:.1%}" if prompt else ""
