"""Is the tier whole? Lookup, shards, movers, disks and what joins the nodes, by `kvray status`."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvray.cli.doctor.finding import Finding, fault, hint, ok
from kvray.cli.memory import node_name
from kvray.cli.transports import Way, ways
from kvray.config import format_size

_PASSING = ("starting", "preparing", "flushing")


def tier_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with the parts; `status` is what `Client.status` returned."""
    shards = status["shards"]
    yield ok("lookup", f"answers, and knows {status['lookup']['keys']} keys")
    if not shards:
        yield fault(
            "shards",
            "no node has a shard",
            "start nodes with the shard.resource or shard.label of the configuration, or unset"
            " them",
        )
    for shard in shards:
        yield _shard(shard)
        yield from _corrupt(shard)
        yield from _disk(shard)
    for way in ways(dict(status)):
        yield _way(way)


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
            "wait some seconds: a frozen or dead shard is started anew; if it stays, look whether"
            " Ray has lost the node (`ray status`)",
        )
    return fault(check, f"is {state}: {message}", "correct what it says, then run `kvray up`")


def _corrupt(shard: Mapping[str, Any]) -> Iterator[Finding]:
    corrupt = shard.get("arena", {}).get("corrupt", 0) + shard.get("nvme", {}).get("corrupt", 0)
    if corrupt:
        yield hint(
            f"shard {node_name(dict(shard))}",
            f"{corrupt} blocks did not have their checksum; they were not used",
            "run `kvray verify`, and test this node's memory and disk",
        )


def _disk(shard: Mapping[str, Any]) -> Iterator[Finding]:
    nvme = shard.get("nvme")
    if nvme is None:
        return
    check = f"disk {node_name(dict(shard))}"
    if nvme["message"]:
        yield fault(
            check, str(nvme["message"]).rstrip("."), "mend the disk, then restart the shard"
        )
    elif nvme["segments_without_room"]:
        yield hint(check, "the disk is full", "free room on it, or lower nvme.capacity")
    elif nvme["write_budget_bytes"] == 0:
        yield hint(check, "the day's writes are used up", "raise nvme.write_gib_per_day")
    elif not nvme["is_direct"]:
        yield hint(
            check,
            "goes through the page cache, since its file system has no direct I/O",
            "put nvme.dir on ext4 or xfs on a local disk",
        )
    else:
        yield ok(check, f"{format_size(nvme['file_bytes'])} of blocks")


def _way(way: Way) -> Finding:
    check = f"way {way.source[:12]} > {way.target[:12]}"
    if way.transport is None:
        return fault(
            check,
            f"nothing can be moved: {way.why}",
            "start the movers anew with `kvray up`, or see staging.transports",
        )
    rate = f", {format_size(way.bytes_per_s)}/s lately" if way.bytes_per_s else ""
    if way.breaker != "closed":
        return hint(
            check,
            f"{way.transport} is left alone for a while after: {way.error}",
            "it is tried again by itself; if it stays, check the network between these nodes",
        )
    return ok(check, f"{way.transport}{rate} ({way.why})")
