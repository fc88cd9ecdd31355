"""Checks the tier by its status; the questions on hits follow the decision tree of docs/faq.md."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from kvray.actors.names import node_of
from kvray.cli.explain import REASONS
from kvray.cli.hits import ended_of, ranks_of, sources_sentence, total_counters
from kvray.cli.status import corrupt_remarks, disk_remark, lost_nodes, unnamed_sentences
from kvray.cli.transports import NodeLink, node_links, slow_nodes
from kvray.config import format_size
from kvray.metrics import figure
from kvray.trace.reasons import COUNTED, MISS_PREFIX


class Finding(NamedTuple):
    """One line of the report."""

    verdict: Literal["ok", "hint", "fault", "skipped"]
    """`hint`: it works, but not as well as it could. `fault`: it does not work. `skipped`: it was
    not checked, and `says` has the reason."""
    check: str
    says: str
    """The result, as a sentence without its full stop."""
    fix: str = ""
    """The remedy; every hint and every fault has one."""


ok, hint, fault, skipped = (partial(Finding, one) for one in ("ok", "hint", "fault", "skipped"))

_PASSING = ("starting", "preparing", "flushing")
_LITTLE = 0.05
"""A reason with a smaller share of the missed tokens, or of the requests, is left out."""
_BYPASSED = (
    "requests bypassed the cache, because more than their tokens decides their blocks, such as a"
    " LoRA adapter or media, and cannot be told"
)
_TENANTLESS = (
    "requests bypassed the cache, because they name no tenant, and there is a tenant secret",
    "have what admits requests set cache_salt to <tenant>/<salt>, see docs/security.md",
)
_LOOK = (
    "look at the engines' logs for lines with `a request goes without the tier`, which name each"
    " reason once, and at docs/tensorrt_llm.md"
)


def tier_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings about all parts; `status` is what `Client.status` returned."""
    shards = status["shards"]
    lookup = status["lookup"]
    if "state" not in lookup:
        yield ok("lookup", f"answers, and knows {lookup['keys']} keys")
    for one in lookup.get("partitions", (lookup,)):
        if "state" in one:
            yield fault(
                one["lookup"],
                f"does not answer ({one['message'].rstrip('.')})",
                "wait until the supervisor has restarted it; if it stays so, its log says why",
            )
    if not shards:
        yield fault(
            "shards",
            "no node has a shard",
            "start nodes with the configuration's shard.resource or shard.label, or unset these",
        )
    for shard in shards:
        yield _shard(shard)
        for remark in corrupt_remarks(shard):
            yield hint(f"shard {node_of(shard['shard'])}", *remark)
        yield from _pages(shard)
        yield from _disk(shard)
    links = node_links(dict(status))
    for link in links:
        yield from _link(link)
    for node, says in lost_nodes(status):
        yield hint(f"node {node}", says, "if nobody took it away, look at Ray on that machine")
    for node, says in slow_nodes(links):
        yield hint(f"node {node}", says, "look at its network, and at what else uses it")


def _shard(shard: Mapping[str, Any]) -> Finding:
    check, state = f"shard {node_of(shard['shard'])}", shard["state"]
    message = str(shard.get("message", "")).rstrip(".")
    if state == "serving":
        arena = shard["arena"]
        full = f"{arena['blocks']} blocks, {arena['leased_blocks']} leased"
        return ok(check, f"serves {format_size(arena['capacity_bytes'])}: {full}")
    if state in _PASSING:
        return hint(check, f"is {state} {message}".strip(), "wait, then look again")
    if state == "unreachable":
        return fault(
            check,
            f"does not answer: {message}",
            "wait some seconds, because a frozen or dead shard is restarted; if it does not answer"
            " then, see in `ray status` whether Ray has lost the node",
        )
    return fault(check, f"is {state}: {message}", "correct what it says, then run `kvray up`")


def _pages(shard: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the pages that the arena got, and the command that would get it larger ones."""
    memory = shard.get("memory")
    if not memory:
        return
    check = f"pages {node_of(shard['shard'])}"
    mapped, huge, nodes = memory["mapped_bytes"], memory["huge_bytes"], memory["numa_nodes"]
    page, over = format_size(memory["huge_page_bytes"]), memory["interleaved_nodes"]
    how = f"interleaved over {over}" if over else f"not interleaved over the {nodes}"
    spread = f", {how} NUMA nodes" if nodes > 1 else ""
    if memory["command"] is None:
        pages = f"huge pages of {page}" if huge else "small pages"
        yield ok(check, f"its memory is in {pages}{spread}")
        return
    share = f"{100 * huge // max(1, mapped)} %" if huge else "none"
    yield hint(
        check,
        f"{share} of its memory is in huge pages{spread}",
        f"for pages of {page} run `{memory['command']}` as root, then `kvray down` and `kvray up`",
    )


def _disk(shard: Mapping[str, Any]) -> Iterator[Finding]:
    nvme = shard.get("nvme")
    if nvme is None:
        return
    check = f"disk {node_of(shard['shard'])}"
    for remark in nvme.get("remarks", ()):
        says, _, fix = str(remark).rstrip(".").partition("; ")
        yield hint(check, says, fix)
    if (remark := disk_remark(nvme))[0]:
        yield (fault if nvme["message"] else hint)(check, *remark)
    else:
        yield ok(check, f"{format_size(nvme['file_bytes'])} of blocks")


def _link(link: NodeLink) -> Iterator[Finding]:
    """Yield what is wrong with a link; how it is otherwise, the table says."""
    check = f"link {link.source} > {link.target}"
    if link.transport is None:
        yield fault(
            check,
            f"no block can be moved: {link.why}",
            "restart the movers with `kvray up`, or see staging.transports",
        )
    elif link.breaker != "closed":
        yield hint(
            check,
            f"{link.transport} is left out for a while after: {link.error}",
            "it is tried again by itself; if that fails, check the network between these nodes",
        )


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
            " --here` in its container, or store with kvray.TensorCache",
        )
        return
    totals = total_counters([*replicas, *ended])
    has_stored = totals["stored_tokens"]  # by the tensor API, whose batch jobs come and go
    if not any(replica["connected"] for replica in replicas) and not has_stored:
        yield hint(
            "replicas",
            f"{num_ranks} ranks have registered, and none is connected now",
            "look at the engines' logs for lines that begin with kvray:",
        )
    for says, fix in unnamed_sentences(replicas):
        yield hint("checkpoint", says, fix)
    if totals["prompt_tokens"]:
        yield ok(
            "hit rate", f"{totals['prompt_tokens']:,} prompt tokens: {sources_sentence(totals)}"
        )
        yield from _missed(replicas, totals)
        yield from _too_short(totals)
        if totals["bypassed_requests"] > _LITTLE * totals["requests"]:
            yield _bypassed(totals, hint)
    elif totals["bypassed_requests"]:
        yield _bypassed(totals, fault, "all ")
    elif not has_stored and not totals["errors"]:
        yield hint(
            "requests",
            f"{num_ranks} ranks are registered, and none has had a request yet",
            "send a prompt of at least two blocks of tokens, then the same to another replica",
        )
    yield from _not_kept(shards, totals)


def _bypassed(
    totals: Mapping[str, int], verdict: Callable[..., Finding], all_: str = ""
) -> Finding:
    """Return why most of the requests that bypassed the cache did so."""
    num, tenantless = totals["bypassed_requests"], totals["tenantless_requests"]
    says, fix = _TENANTLESS if 2 * tenantless > num else (_BYPASSED, _LOOK)
    return verdict("requests", f"{all_}{num} {says}", fix)


def _too_short(totals: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a hint if most tokens were in no block that anybody could have promised."""
    asked = [name for name in totals if name.startswith(MISS_PREFIX)]
    asked += ["local_tokens", "hit_tokens"]
    left = totals["prompt_tokens"] - sum(totals[name] for name in asked)
    if 2 * left > totals["prompt_tokens"]:
        yield hint(
            "prompts",
            f"{left:,} prompt tokens are in no whole block before their prompt's last token, and"
            " only such blocks can hit",
            "compare the prompts' lengths with the engine's tokens_per_block",
        )


def _missed(replicas: Sequence[Mapping[str, Any]], totals: Counter[str]) -> Iterator[Finding]:
    """Yield a hint if each replica has its own namespace, and the reasons of most misses."""
    named = [replica for replica in replicas if replica.get("is_named", True)]
    spaces = {replica["namespace"] for replica in named}
    names = {replica["replica"] for replica in named}
    if len(names) > 1 and len(spaces) == len(names):
        yield hint(
            "namespaces",
            f"each of the {len(names)} replicas has its own namespace, so they share nothing,"
            " unless they differ in their number of ranks alone",
            "start them with the same model and engine arguments; `kvray status --wide` shows the"
            " fields that differ",
        )
    missed = [(name, count) for name, count in totals.most_common() if name.startswith(MISS_PREFIX)]
    least = max(1.0, _LITTLE * sum(count for _, count in missed))
    for name, tokens in missed:
        reason = name.removeprefix(MISS_PREFIX)
        if reason in COUNTED and tokens >= least:
            means, advice = REASONS[reason]
            fix = advice[0].lower() + advice[1:].rstrip(".")
            yield hint(f"missed: {reason}", f"{tokens} tokens: {means}", fix)


def _not_kept(shards: list[dict[str, Any]], totals: Mapping[str, int]) -> Iterator[Finding]:
    dropped = sum(figure(shard, "dropped_blocks_total", tier="host") for shard in shards)
    if dropped:
        yield hint(
            "saves",
            f"{dropped} blocks were not stored, because their arena was full of leased blocks, or a"
            " block before them was not stored",
            "see to other reasons first, where there are any; else raise arena.capacity, or look"
            " for engines with long leases in the shards' logs",
        )
    if totals["dropped_blocks"]:
        prefix = "dropped_blocks_"
        found = sorted((-count, name) for name, count in totals.items() if name.startswith(prefix))
        why = ", ".join(f"{-count} {name.removeprefix(prefix)}" for count, name in found if count)
        yield hint(
            "saves",
            f"{totals['dropped_blocks']} blocks were not stored" + (f": {why}" if why else ""),
            "see the reason in docs/metrics.md; if saves were too slow (too_many, too_slow), raise"
            " connector.saves_max, or give the engine one more core",
        )
    if totals["dropped_tokens"]:
        yield hint(
            "saves",
            f"{totals['dropped_tokens']:,} tokens that a TensorCache was given were not stored",
            "look at its process's log for lines that begin with kvray:, which say why",
        )
    if totals["errors"]:
        yield hint(
            "errors",
            f"the connectors had {totals['errors']} errors, and computed these requests",
            "look at the engines' logs for lines that begin with kvray:, and report defects",
        )
