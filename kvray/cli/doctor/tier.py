"""Checks the parts of the tier by its status: lookup, shards, disks, links between nodes."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvray.cli.doctor.finding import Finding, fault, hint, ok
from kvray.cli.text.memory import node_name
from kvray.cli.text.transports import NodeLink, node_links
from kvray.config import format_size

_PASSING = ("starting", "preparing", "flushing")


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
        yield from _corrupt(shard)
        yield from _pages(shard)
        yield from _disk(shard)
    for link in node_links(dict(status)):
        yield _link(link)


def _shard(shard: Mapping[str, Any]) -> Finding:
    check, state = f"shard {node_name(dict(shard))}", shard["state"]
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


def _corrupt(shard: Mapping[str, Any]) -> Iterator[Finding]:
    corrupt = shard.get("arena", {}).get("corrupt", 0) + shard.get("nvme", {}).get("corrupt", 0)
    if corrupt:
        yield hint(
            f"shard {node_name(dict(shard))}",
            f"{corrupt} blocks did not have their checksum and were not used",
            "run `kvray verify`, and test this node's memory and disk",
        )


def _pages(shard: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the pages that the arena got, and the command that would get it larger ones."""
    memory = shard.get("memory")
    if not memory:
        return
    check = f"pages {node_name(dict(shard))}"
    mapped, huge, nodes = memory["mapped_bytes"], memory["huge_bytes"], memory["numa_nodes"]
    page, over = format_size(memory["huge_page_bytes"]), memory["interleaved_nodes"]
    spread = ""
    if nodes > 1:
        spread = f", interleaved over {over} NUMA nodes"
        if not over:
            spread = f", not interleaved over the {nodes} NUMA nodes"
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
    check = f"disk {node_name(dict(shard))}"
    for remark in nvme.get("remarks", ()):
        says, _, fix = str(remark).rstrip(".").partition("; ")
        yield hint(check, says, fix)
    if nvme["message"]:
        out = "is out, and the node goes on with its memory: " if nvme.get("state") == "out" else ""
        yield fault(
            check,
            f"{out}{str(nvme['message']).rstrip('.')}",
            "mend the disk; the shard then takes it back by itself",
        )
    elif nvme["segments_without_room"]:
        yield hint(check, "the disk is full", "free room on it, or lower nvme.capacity")
    elif nvme["write_budget_bytes"] == 0:
        yield hint(check, "the day's budget of writes is used up", "raise nvme.write_gib_per_day")
    elif not nvme["is_direct"]:
        yield hint(
            check,
            "goes through the page cache, because its file system has no direct I/O",
            "put nvme.dir on ext4 or xfs on a local disk",
        )
    else:
        yield ok(check, f"{format_size(nvme['file_bytes'])} of blocks")


def _link(link: NodeLink) -> Finding:
    check = f"link {link.source[:12]} > {link.target[:12]}"
    if link.transport is None:
        return fault(
            check,
            f"no block can be moved: {link.why}",
            "restart the movers with `kvray up`, or see staging.transports",
        )
    rate = f", {format_size(link.bytes_per_s)}/s lately" if link.bytes_per_s else ""
    if link.breaker != "closed":
        return hint(
            check,
            f"{link.transport} is left out for a while after: {link.error}",
            "it is tried again by itself; if that fails, check the network between these nodes",
        )
    return ok(check, f"{link.transport}{rate} ({link.why})")
