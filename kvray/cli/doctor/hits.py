"""Why is the hit rate what it is? A walk through `kvray status`, the first explanation first.

The questions are those of the decision tree in docs/faq.md, in its order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvray.cli.doctor.finding import Finding, fault, hint, ok

_MISS = "miss_tokens_"
_LITTLE = 0.05
"""A reason with a smaller share of the missed tokens explains nothing."""

FIXES: Mapping[str, tuple[str, str]] = {
    "reuse_disabled": (
        "the engine's block reuse is off, so it ignores every match",
        "set kv_cache_config.enable_block_reuse to true",
    ),
    "unaligned": (
        "the engine asked from the middle of a block",
        "set kv_cache_config.enable_partial_reuse to false",
    ),
    "incompatible": (
        "only replicas with other settings have stored these prompts",
        "start the replicas with the same model and engine arguments; `kvray status` shows the"
        " fields that differ",
    ),
    "store_down": (
        "the engine had no tier at that time",
        "run `kvray doctor` in the engine's container, and `kvray status`",
    ),
    "arena_busy": (
        "the arena's lock was taken for longer than arena.lock_wait_s",
        "raise arena.lock_wait_s a little, or use larger blocks",
    ),
    "too_slow": (
        "blocks of another node or the disk did not come within connector.stage_wait_s",
        "have the router call Client.prefetch, or raise connector.stage_wait_s; `kvray doctor`"
        " shows the transports and their rates",
    ),
    "cheaper_to_recompute": (
        "bringing the blocks would have taken longer than computing them",
        "nothing has to be done; a faster transport (RDMA) would change it",
    ),
    "corrupt": (
        "blocks did not have their checksum and were not used",
        "run `kvray verify`, and test the memory and disks of the nodes that it names",
    ),
    "not_stored": (
        "nobody had these blocks: prompts are new, or their blocks were evicted",
        "`kvray explain` tells which of the two; for evicted ones raise arena.capacity or set"
        " nvme.dir",
    ),
}
"""Miss reason -> (what it means, what to do)."""


def hit_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield why tokens are missed; `status` is what `Client.status` returned."""
    shards = status["shards"]
    replicas = [replica for shard in shards for replica in shard.get("replicas", [])]
    if not replicas:
        yield hint(
            "replicas",
            "no engine has registered with this tier",
            "give each engine the connector (`kvray connector-config`), and run `kvray doctor"
            " --here` in its container",
        )
        return
    if not any(replica["connected"] for replica in replicas):
        yield hint(
            "replicas",
            f"none of the {len(replicas)} ranks that had registered is connected now",
            "look at the engines' logs for lines that begin with kvray:",
        )
    totals = _totals(replicas)
    if not totals["requests"]:
        yield from _no_requests(totals, len(replicas))
        return
    yield _rate(totals)
    yield from _alone(replicas)
    yield from _reasons(totals)
    yield from _not_kept(shards, totals)


def _totals(replicas: list[dict[str, Any]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for replica in replicas:
        totals.update(replica["counters"])
    return totals


def _no_requests(totals: Mapping[str, int], num_ranks: int) -> Iterator[Finding]:
    if totals["bypassed_requests"]:
        yield fault(
            "requests",
            f"all {totals['bypassed_requests']} requests went past the cache: what they were asked"
            " with cannot be told from others (a LoRA adapter or medium without an identity)",
            "look at the engines' logs for the reason, and at docs/tensorrt_llm.md",
        )
    else:
        yield hint(
            "requests",
            f"{num_ranks} ranks are registered and none was asked for anything yet",
            "send a prompt of at least two blocks of tokens, then the same at another replica",
        )


def _rate(totals: Mapping[str, int]) -> Finding:
    asked = max(1, totals["prompt_tokens"] - totals["local_tokens"])
    share = totals["hit_tokens"] / asked
    says = (
        f"{share:.0%} of the {asked} prompt tokens that the engines did not have themselves came"
        " from the tier"
    )
    return ok("hit rate", says)


def _alone(replicas: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield where replicas cannot share, as each has a namespace of its own."""
    spaces = {replica["namespace"] for replica in replicas}
    names = {replica["replica"] for replica in replicas}
    if len(names) > 1 and len(spaces) == len(names):
        yield hint(
            "namespaces",
            f"each of the {len(names)} replicas has a namespace of its own, so none shares with"
            " another",
            "start them with the same model and engine arguments; `kvray status` shows the fields"
            " that differ",
        )


def _reasons(totals: Counter[str]) -> Iterator[Finding]:
    """Yield the reasons of most missed tokens, the largest first."""
    missed = {
        name.removeprefix(_MISS): value
        for name, value in totals.most_common()
        if name.startswith(_MISS) and value
    }
    all_missed = sum(missed.values())
    for reason, tokens in missed.items():
        if reason in FIXES and tokens >= _LITTLE * all_missed:
            says, fix = FIXES[reason]
            yield hint(f"missed: {reason}", f"{tokens} tokens: {says}", fix)


def _not_kept(shards: list[dict[str, Any]], totals: Mapping[str, int]) -> Iterator[Finding]:
    dropped = sum(shard.get("arena", {}).get("dropped", 0) for shard in shards)
    if dropped:
        yield hint(
            "saves",
            f"{dropped} blocks were not stored, since everything in their arena was leased",
            "raise arena.capacity, or look for engines with long leases in the shards' logs",
        )
    if totals["dropped_blocks"]:
        yield hint(
            "saves",
            f"{totals['dropped_blocks']} blocks were not stored, since saves did not keep up",
            "raise connector.saves_max, or give the engine a core more",
        )
    if totals["errors"]:
        yield hint(
            "errors",
            f"the connectors met {totals['errors']} errors, after which requests were computed",
            "look at the engines' logs for lines that begin with kvray:, and report defects",
        )
