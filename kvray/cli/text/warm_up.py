"""How far the warm-up of a node is, in words."""

from collections.abc import Mapping
from typing import Any

from kvray.config import format_size


def warm_up_sentence(shard: str, found: Mapping[str, Any]) -> str:
    """Return how far the warm-up of a shard is, as `kvray status` has it."""
    came = f"{found['blocks']:,} blocks ({format_size(found['bytes'])})"
    if found["state"] == "moving":
        how = "is warmed up"
        came += f" are here, {format_size(found['left_bytes'])} are to come"
    else:
        how = "was warmed up" if found["state"] == "done" else "could not be warmed up"
        if nodes := len(found["sources"]):
            came += f" of {nodes} other {'node' if nodes == 1 else 'nodes'}"
        came += f" in {found['seconds']:.1f} s"
    message = f" {found['message']}" if found["message"] else ""
    return f"{shard} {how} ({found['by']}): {came}.{message}"
