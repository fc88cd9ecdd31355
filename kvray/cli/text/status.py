"""The parts of `kvray status` on drains, KV events, memory, namespaces and missing keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from kvray.cli.text.hits import ranks_of
from kvray.config import format_size
from kvray.console.output import PlainTable, empty_table

_COLUMNS_MAX = 6
_NAMES_MAX = 4


def drain_sentence(shard: str, found: Mapping[str, Any]) -> str:
    """Return how far the drain of a shard is, as `kvray status` has it."""
    moved = f"{found['moved_blocks']:,} blocks ({format_size(found['moved_bytes'])}) are elsewhere"
    left = format_size(found["left_bytes"])
    seconds = "" if found["seconds_left"] is None else f" within {found['seconds_left']:.0f} s"
    who = " and ".join(found["by"])
    says = {
        "moving": f"is to go{seconds}, as {who} says: {moved}, {left} are left",
        "moved": f"is to go and may: {moved}",
        "late": f"is to go and has no time left: {moved}, {left} are not",
    }[found["state"]]
    return f"{shard} {says}." + (f" {found['message']}" if found.get("message") else "")


def events_report(shards: Sequence[Mapping[str, Any]]) -> list[Table | str]:
    """Return a table of where each replica's events are published, and what is wrong with them."""
    published = [(shard, shard["events"]) for shard in shards if "events" in shard]
    if not published:
        return []
    table = empty_table("replica", "events", "replays", title="KV events")
    for _, events in published:
        for replica, (live, replay) in events["replicas"].items():
            table.add_row(replica, live, replay)
    problems = [
        f"{shard['shard']}: {events['problem']}" for shard, events in published if events["problem"]
    ]
    return [table, *problems]


def node_name(shard: dict[str, Any]) -> str:
    """Return the name of a shard's node in tables."""
    return str(shard.get("node_id", shard["shard"]).removeprefix("kvray-shard-"))[:12]


def shares_report(shards: list[dict[str, Any]]) -> list[Table | str]:
    """Return the share of each namespace in each arena; nothing if one has all, without a quota."""
    held = [(shard, one) for shard in shards for one in _held(shard)]
    is_shared = any(len(_held(shard)) > 1 for shard in shards)
    if not is_shared and all(one["quota_bytes"] is None for _, one in held):
        return []
    numbers = ("blocks", "memory", "quota")
    table = empty_table("node", "namespace", numbers=numbers, title="Memory by namespace")
    for shard, one in held:
        quota = one["quota_bytes"]
        table.add_row(
            node_name(shard),
            one["namespace"] or "not known",
            str(one["blocks"]),
            format_size(one["bytes"]),
            "" if quota is None else format_size(quota),
        )
    num_gone = sum(shard["arena"]["over_quota"] for shard in shards if _held(shard))
    gone = f"{num_gone} blocks were evicted because their namespace was over its quota."
    return [table, gone] if num_gone else [table]


def _held(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the namespaces of an arena; nothing before it serves."""
    held: list[dict[str, Any]] = shard.get("arena", {}).get("namespaces", [])
    return held


def namespaces_report(shards: list[dict[str, Any]]) -> tuple[Table, str] | None:
    """Return how the replicas' namespaces differ, and a sentence on it; None if they do not.

    The table has one column for each namespace and one row for each field that differs.
    """
    namespaces = {
        digest: values for shard in shards for digest, values in shard.get("namespaces", {}).items()
    }
    replicas = _replicas_by_namespace(shards)
    digests = [digest for digest in replicas if digest in namespaces]
    if len(digests) < 2:
        return None
    shown = digests[:_COLUMNS_MAX]
    table = PlainTable(title="Namespaces", title_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for digest in shown:
        table.add_column(f"{_names(replicas[digest])}\n{digest}", overflow="fold")
    for field in {name: None for digest in shown for name in namespaces[digest]}:
        values = [str(namespaces[digest].get(field, "")) for digest in shown]
        if len(set(values)) > 1:
            table.add_row(field, *values)
    return table, _sentence(len(digests))


def _replicas_by_namespace(shards: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return digest -> names of its replicas; those that are gone too: their blocks are here."""
    found: dict[str, list[str]] = {}
    for rank in ranks_of(shards):
        names = found.setdefault(rank["namespace"], [])
        name = rank["replica"] + ("" if rank["connected"] else " gone")
        if name not in names:
            names.append(name)
    return found


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_MAX
    return "\n".join([*names[:_NAMES_MAX], *([f"and {more} more"] if more > 0 else [])])


def _sentence(num_namespaces: int) -> str:
    more = num_namespaces - _COLUMNS_MAX
    return (
        "Replicas in different columns share no blocks; to have them share, start them with the"
        " same model and engine arguments."
        + (f" {more} more namespaces are in kvray status --json." if more > 0 else "")
    )


def unnamed_sentences(replicas: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (the reason, the remedy) for each rank that has no keys yet."""
    for replica in replicas:
        counters = replica["counters"]
        if replica["connected"] and "fingerprint_bytes" in counters:
            who = f"replica {replica['replica']} rank {replica['rank']}"
            if counters.get("fingerprint_failed"):
                yield (
                    f"{who} cannot read its checkpoint, and uses no tier",
                    "look at its log for the reason, or name the model in connector.model_key",
                )
            else:
                yield (
                    f"{who} uses no tier until it has read its checkpoint: {_progress(counters)}",
                    "wait, or name the model in connector.model_key",
                )


def _progress(counters: Mapping[str, int]) -> str:
    total, done = counters["fingerprint_bytes"], counters.get("fingerprint_bytes_read", 0)
    left_s = (total - done) * counters.get("uptime_s", 0) // max(done, 1)
    about = f", about {left_s} s left" if done else ""
    return f"{format_size(done)} of {format_size(total)} read{about}"
