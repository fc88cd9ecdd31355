"""What `kvray status` says of the memory that an arena got."""

from typing import Any

from kvray.config import format_size


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
