"""How far the drain of a node is, in words."""

from collections.abc import Mapping
from typing import Any

from kvray.config import format_size


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
