"""The part of `kvray status` about who has how much of each arena."""

from typing import Any

from rich.table import Table

from kvray.config import format_size
from kvray.console.output import empty_table


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
