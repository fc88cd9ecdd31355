"""What `kvray status` says of KV events."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvray.console.output import empty_table


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
