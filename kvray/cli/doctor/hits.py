"""Explains the hit rate: a walk through the tier's status, the first explanation first.

The questions are those of the decision tree in docs/faq.md, in its order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvray.cli.doctor.finding import Finding, fault, hint, ok
from kvray.cli.text.hits import ended_of, ranks_of, sources_sentence, total_counters
from kvray.cli.text.reasons import REASONS
from kvray.cli.text.unnamed import unnamed_sentences
from kvray.trace.reasons import COUNTED, MISS_PREFIX

_LITTLE = 0.05
"""A reason with a smaller share of the missed tokens is left out."""


def hit_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield why tokens are missed; `status` is what `Client.status` returned."""
    shards = status["shards"]
    replicas, ended = ranks_of(shards), ended_of(shards)
    num_ranks = len(replicas) + sum(one["ranks"] for one in ended)
    if not num_ranks:
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
            f"{num_ranks} ranks have registered, and none is connected now",
            "look at the engines' logs for lines that begin with kvray:",
        )
    for says, fix in unnamed_sentences(replicas):
        yield hint("checkpoint", says, fix)
    totals = total_counters([*replicas, *ended])
    if not totals["prompt_tokens"]:
        yield from _no_requests(totals, num_ranks)
        return
    yield _rate(totals)
    yield from _alone(replicas)
    yield from _reasons(totals)
    yield from _not_kept(shards, totals)


def _no_requests(totals: Mapping[str, int], num_ranks: int) -> Iterator[Finding]:
    if totals["bypassed_requests"]:
        yield fault(
            "requests",
            f"all {totals['bypassed_requests']} requests bypassed the cache, because a LoRA adapter"
            " or medium of theirs has no identity",
            "look at the engines' logs for the reason, and at docs/tensorrt_llm.md",
        )
    else:
        yield hint(
            "requests",
            f"{num_ranks} ranks are registered, and none has had a request yet",
            "send a prompt of at least two blocks of tokens, then the same to another replica",
        )


def _rate(totals: Mapping[str, int]) -> Finding:
    return ok("hit rate", f"{totals['prompt_tokens']:,} prompt tokens: {sources_sentence(totals)}")


def _alone(replicas: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a hint if no two replicas can share, because each has its own namespace."""
    spaces = {replica["namespace"] for replica in replicas}
    names = {replica["replica"] for replica in replicas}
    if len(names) > 1 and len(spaces) == len(names):
        yield hint(
            "namespaces",
            f"each of the {len(names)} replicas has its own namespace, so they share nothing",
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
            f"{dropped} blocks were not stored, because their arena was full of leased blocks",
            "raise arena.capacity, or look for engines with long leases in the shards' logs",
        )
    if totals["dropped_blocks"]:
        yield hint(
            "saves",
            f"{totals['dropped_blocks']} blocks were not stored{_why_not(totals)}",
            "see the reason in docs/metrics.md; if saves were too slow (too_many, too_slow), raise"
            " connector.saves_max, or give the engine one more core",
        )
    if totals["errors"]:
        yield hint(
            "errors",
            f"the connectors had {totals['errors']} errors, and computed these requests",
            "look at the engines' logs for lines that begin with kvray:, and report defects",
        )


def _why_not(totals: Mapping[str, int]) -> str:
    """Return ": 3 too_slow, 2 no_room", for example."""
    prefix = "dropped_blocks_"
    found = sorted((-count, name) for name, count in totals.items() if name.startswith(prefix))
    reasons = ", ".join(f"{-count} {name.removeprefix(prefix)}" for count, name in found if count)
    return f": {reasons}" if reasons else ""
