"""Why is the hit rate what it is? A walk through `kvray status`, the first explanation first.

The questions are those of the decision tree in docs/faq.md, in its order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvray.cli.doctor.finding import Finding, fault, hint, ok
from kvray.cli.reasons import COUNTED, MISS_PREFIX, REASONS

_LITTLE = 0.05
"""A reason with a smaller share of the missed tokens explains nothing."""


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
        name.removeprefix(MISS_PREFIX): value
        for name, value in totals.most_common()
        if name.startswith(MISS_PREFIX) and value
    }
    all_missed = sum(missed.values())
    for reason, tokens in missed.items():
        if reason in COUNTED and tokens >= _LITTLE * all_missed:
            means, advice = REASONS[reason]
            fix = advice[0].lower() + advice[1:].rstrip(".")
            yield hint(f"missed: {reason}", f"{tokens} tokens: {means}", fix)


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
