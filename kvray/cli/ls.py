"""`kvray ls`: the stored namespaces, and the most used prefixes of one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from kvray.actors.names import node_of
from kvray.cli.asking import open_client, show_answer
from kvray.cli.explain import shortened
from kvray.cli.hits import tier_share
from kvray.config import format_size
from kvray.console.options import AddressOption, ConfigOption, JsonOption
from kvray.console.output import empty_table


def ls(
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="List the prefixes of this namespace, named by its 8 hex digits.",
        ),
    ] = None,
    hottest: Annotated[
        int, typer.Option(min=1, max=1000, help="How many prefixes to list, the most used first.")
    ] = 20,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces that have blocks or replicas, or the prefixes of one of them."""
    with open_client(config, address) as client:
        status = client.status()
        contents = client.contents(namespace, hottest=hottest)
    shards = status["shards"]
    found: dict[str, Any] = {
        "hosts": status["hosts"],
        "namespaces": namespaces(shards, contents),
        "silent": [one["shard"] for one in shards if one["shard"] not in contents],
    }
    if namespace is not None:
        found["prefixes"] = prefixes(contents)[:hottest]
    show_answer(found, lambda found: _report(found, namespace), as_json=as_json)


def namespaces(
    shards: Sequence[Mapping[str, Any]], contents: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one entry for each namespace that has blocks or replicas, the largest first.

    `shards` are those of `Client.status`, `contents` the answer of `Client.contents`.
    """
    found: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for name, fields in shard.get("namespaces", {}).items():
            _entry(found, name)["fields"] = fields
        for replica in shard.get("replicas", ()):
            one = _entry(found, replica["namespace"])
            if replica["connected"] and replica["replica"] not in one["replicas"]:
                one["replicas"].append(replica["replica"])
            for counter in ("hit_tokens", "prompt_tokens"):
                one[counter] += replica["counters"].get(counter, 0)
    for answer in contents.values():
        for name, sizes in answer["namespaces"].items():
            one = _entry(found, name)
            for counter, value in sizes.items():
                one[counter] += value
    return sorted(found.values(), key=lambda one: -(one["host_bytes"] + one["nvme_bytes"]))


def prefixes(contents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the prefixes of all shards, each once, the most used first."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for shard, answer in contents.items():
        for one in answer["prefixes"]:
            key = one["key"], one["num_blocks"]
            known = found.setdefault(key, {**one, "uses": 0, "nodes": []})
            known["uses"] += one["uses"]
            known["nodes"].append(node_of(shard))
            ages = [age for age in (known["used_s_ago"], one["used_s_ago"]) if age is not None]
            known["used_s_ago"] = min(ages, default=None)
    return sorted(found.values(), key=lambda one: (-one["uses"], -one["num_blocks"]))


def namespaces_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row for each namespace."""
    numbers = ("in memory", "blocks", "on disk", "blocks", "from the tier")
    table = empty_table("namespace", "model", "dtype", "replicas", numbers=numbers, folds=True)
    for one in found:
        fields = one["fields"]
        table.add_row(
            one["namespace"] or "not known",
            model_text(fields) or "no known replica",
            str(fields.get("kv_dtype", "")),
            ", ".join(one["replicas"]),
            format_size(one["host_bytes"]),
            f"{one['host_blocks']:,}",
            format_size(one["nvme_bytes"]),
            f"{one['nvme_blocks']:,}",
            tier_share(one),
        )
    return table


def model_text(fields: Mapping[str, Any]) -> str:
    """Return what people call the model of a namespace; empty if nobody has said."""
    kind, _, name = str(fields.get("model", "")).partition(":")
    return shortened(str(fields.get("served") or (name if kind == "key" else "")))


def prefixes_table(found: Sequence[Mapping[str, Any]], tokens_per_block: int) -> Table:
    """Return one row for each prefix; `tokens_per_block` 0: not known."""
    table = empty_table(
        "last block", "nodes", numbers=("blocks", "tokens", "uses", "last use"), folds=True
    )
    for one in found:
        age = one["used_s_ago"]
        table.add_row(
            one["key"],
            ", ".join(one["nodes"]),
            f"{one['num_blocks']:,}",
            f"{one['num_blocks'] * tokens_per_block:,}" if tokens_per_block else "",
            f"{one['uses']:,}",
            "not yet" if age is None else f"{age:,.0f} s ago",
        )
    return table


def _report(found: Mapping[str, Any], namespace: str | None) -> Iterator[Table | str]:
    entries = found["namespaces"]
    if found["silent"]:
        yield f"No answer from {', '.join(found['silent'])}: their blocks are not counted."
    if namespace is None:
        yield namespaces_table(entries) if entries else "Nothing is stored."
    elif not found["prefixes"]:
        yield f"Nothing of namespace {namespace} is in memory; `kvray ls` shows what is."
    else:
        sizes = {one["namespace"]: one["fields"].get("tokens_per_block", 0) for one in entries}
        yield prefixes_table(found["prefixes"], sizes.get(namespace, 0))


def _entry(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    counters = ("host_blocks", "host_bytes", "nvme_blocks", "nvme_bytes")
    made = {"namespace": name, "fields": {}, "replicas": [], "hit_tokens": 0, "prompt_tokens": 0}
    return found.setdefault(name, {**made, **dict.fromkeys(counters, 0)})
