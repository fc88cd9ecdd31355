"""The part of `kvray status` about replicas that share no blocks: where their namespaces differ."""

from typing import Any

from rich import box
from rich.table import Table

from kvray.cli.text.hits import ranks_of
from kvray.console.output import PlainTable

_COLUMNS_MAX = 6
_NAMES_MAX = 4


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
