"""What `kvray status` says of the memory that an arena got, and of who has how much of it."""

from typing import Any

from rich import box
from rich.table import Table

from kvray.config import format_size


def node_name(shard: dict[str, Any]) -> str:
    """Return what a shard's node is called in tables."""
    return str(shard.get("node_id", shard["shard"]).removeprefix("kvray-shard-"))[:12]


def shares_report(shards: list[dict[str, Any]]) -> list[Table | str]:
    """Return what each namespace has of each arena; nothing if one has all, and no quota."""
    held = [(shard, one) for shard in shards for one in _held(shard)]
    is_shared = any(len(_held(shard)) > 1 for shard in shards)
    if not is_shared and all(one["quota_bytes"] is None for _, one in held):
        return []
    table = Table(
        title="Memory by namespace", title_justify="left", box=box.SIMPLE, collapse_padding=True
    )
    for name in ("node", "namespace"):
        table.add_column(name, no_wrap=True)
    for name in ("blocks", "memory", "quota"):
        table.add_column(name, justify="right")
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
    gone = f"{num_gone} blocks went because their namespace was over its quota."
    return [table, gone] if num_gone else [table]


def memory_sentences(shards: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each shard that knows, with the command that would get it more."""
    return [
        f"{shard['shard']}: {_sentence(shard['memory'])}" for shard in shards if shard.get("memory")
    ]


def _sentence(memory: dict[str, Any]) -> str:
    mapped, huge = memory["mapped_bytes"], memory["huge_bytes"]
    page = format_size(memory["huge_page_bytes"])
    spread = ""
    if memory["numa_nodes"] > 1:
        over = memory["interleaved_nodes"]
        spread = f", interleaved over {over} NUMA nodes"
        if not over:
            spread = f", not interleaved over the {memory['numa_nodes']} NUMA nodes"
    if memory["command"] is None:
        pages = f"huge pages of {page}" if huge else "small pages"
        return f"its memory is in {pages}{spread}."
    share = (
        f"{100 * huge // max(1, mapped)} % of its memory is" if huge else "none of its memory is"
    )
    return (
        f"{share} in huge pages{spread}; for pages of {page} run `{memory['command']}` as root,"
        " then `kvray down` and `kvray up`."
    )


def _held(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what an arena says of namespaces; nothing before it is served."""
    held: list[dict[str, Any]] = shard.get("arena", {}).get("namespaces", [])
    return held
