"""`kvray status`: what shards, lookup and replicas say of themselves."""

import json
import sys
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvray.cli.boundary import boundary
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.config import format_size, load_config

_ARENA_COLUMNS = ("blocks", "leased_blocks", "evicted", "dropped", "corrupt")
_MISS_PREFIX = "miss_"


def status(
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the shards and their memory, the lookup, and the replicas with their hits."""
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.client import Client

        with Client(settings) as client:
            found = client.status()
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            _print(found)


def _print(found: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    lookup = found["lookup"]
    console.print(
        f"Tier [bold]{found['cluster_name']}[/]: {_count(found['shards'], 'shard')},"
        f" the lookup knows {lookup['keys']} keys"
    )
    console.print(shards_table(found["shards"]))
    for shard in found["shards"]:
        if shard.get("message"):
            console.print(f"{shard['shard']}: {shard['message']}")
    replicas = [replica for shard in found["shards"] for replica in shard.get("replicas", [])]
    if replicas:
        console.print(replicas_table(replicas))
    else:
        console.print("No replica has registered yet.")


def shards_table(shards: list[dict[str, Any]]) -> Table:
    """Return one row for each shard."""
    table = Table(title="Shards", title_justify="left", box=box.SIMPLE)
    for name in ("node", "state", "memory"):
        table.add_column(name, no_wrap=True)
    for name in _ARENA_COLUMNS:
        table.add_column(name.removesuffix("_blocks"), justify="right")
    for shard in shards:
        table.add_row(*_shard_cells(shard))
    return table


def replicas_table(replicas: list[dict[str, Any]]) -> Table:
    """Return one row for each rank; the columns are the figures that the ranks report."""
    names = sorted({name for replica in replicas for name in replica["counters"]}, key=_order)
    table = Table(title="Replicas", title_justify="left", box=box.SIMPLE)
    for name in ("replica", "rank", "connected", "namespace"):
        table.add_column(name, no_wrap=name == "replica")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for replica in replicas:
        counters = replica["counters"]
        table.add_row(
            replica["replica"],
            str(replica["rank"]),
            "yes" if replica["connected"] else "no",
            replica["namespace"],
            *(str(counters[name]) if name in counters else "" for name in names),
        )
    return table


def _shard_cells(shard: dict[str, Any]) -> list[str]:
    node = str(shard.get("node_id", shard["shard"]).removeprefix("kvray-shard-"))[:12]
    state = shard["state"]
    arena = shard.get("arena")
    if state == "preparing":
        state = f"preparing {100 * shard['done'] // max(1, shard['total'])} %"
    if arena is None:
        return [node, state]
    memory = f"{format_size(arena['resident_bytes'])}/{format_size(arena['capacity_bytes'])}"
    return [node, state, memory, *(str(arena[name]) for name in _ARENA_COLUMNS)]


def _order(name: str) -> tuple[bool, str]:
    """Sort hits before misses."""
    return name.startswith(_MISS_PREFIX), name


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
