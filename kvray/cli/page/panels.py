"""The panels of the page as plain data, from what other commands show; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from kvray.actors.names import node_of
from kvray.actors.tier.sizing import combined
from kvray.cli.explain import request_report, requests_sentence
from kvray.cli.hits import (
    History,
    NodeRates,
    ended_of,
    headline,
    ranks_of,
    rate_text,
    replicas_table,
    sources_sentence,
    total_counters,
)
from kvray.cli.ls import namespaces, namespaces_table, prefixes, prefixes_table
from kvray.cli.size import missing_sentences, sizing_sentences, sizing_title
from kvray.cli.status import lookup_sentence, state_text
from kvray.cli.transports import node_links, node_links_table
from kvray.config import format_size
from kvray.metrics import figure

Shards = Sequence[Mapping[str, Any]]
Seen = Mapping[str, tuple[float, Mapping[str, Any]]]

HOTTEST = 8
"""Prefixes of one namespace."""
_LINKS_MAX = 40
_CURVES_MAX = 4


def status_panels(status: Mapping[str, Any], rates: History) -> dict[str, Any]:
    """Return what `kvray status` knows, with rates, except for the nodes."""
    shards = status["shards"]
    links = sorted(
        node_links(dict(status)), key=lambda link: (bool(link.transport), link.breaker == "closed")
    )
    replicas = rates.replicas()
    totals = total_counters([*ranks_of(shards), *ended_of(shards)])
    prompt = totals["prompt_tokens"]
    without = ", ".join(silent(shards))
    return {
        "headline": plain(headline(status["cluster_name"], rates, replicas)),
        "lookup": plain(lookup_sentence(status["lookup"])),
        "links": plain(node_links_table(links[:_LINKS_MAX])) if links else None,
        "num_links_hidden": max(0, len(links) - _LINKS_MAX),
        "replicas": plain(replicas_table(replicas)) if replicas else None,
        "totals": f"{prompt:,} prompt tokens so far: {sources_sentence(totals)}" if prompt else "",
        "without": f"Without node {without}, which does not answer." if without else "",
        "curve": _curve(combined(shards)),
    }


def nodes(rates: History, seen: Seen, now: float) -> list[dict[str, Any]]:
    """Return each node, with its last figures and their age if it does not answer."""
    return [_node(one, seen, now) for one in rates.nodes()]


def silent(shards: Shards) -> list[str]:
    """Return the nodes whose shards do not answer."""
    return [node_of(one["shard"]) for one in shards if one["state"] == "unreachable"]


def prefixes_panel(shards: Shards, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kvray ls` shows: all namespaces, and the prefixes of the largest."""
    entries = namespaces(shards, answer["contents"])
    sizes = {one["namespace"]: one["fields"].get("tokens_per_block", 0) for one in entries}
    hottest = {name: prefixes(told)[:HOTTEST] for name, told in answer["prefixes"].items()}
    return {
        "namespaces": plain(namespaces_table(entries)) if entries else None,
        "hottest": [
            {"namespace": name, "table": plain(prefixes_table(told, sizes.get(name, 0)))}
            for name, told in hottest.items()
        ],
        "silent": [one["shard"] for one in shards if one["shard"] not in answer["contents"]],
    }


def requests_panel(answer: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the latest requests, each with the text of `kvray explain`."""
    requests = answer["requests"]
    return {
        "says": plain(requests_sentence(requests)) if requests else answer.get("says", ""),
        "silent": answer["silent"],
        "list": [
            {
                "id": f"{one['replica']} {one['rank']} {one['request_id']} {one['at']}",
                "replica": one["replica"],
                "age_s": round(max(0.0, now - one["at"]), 1),
                "tokens": one["num_tokens"],
                "own": one["own_tokens"],
                "hit": one["hit_tokens"],
                "missed": one["missed_tokens"],
                "report": [plain(part) for part in request_report(one, now=now)],
            }
            for one in requests
        ],
    }


def _node(rates: NodeRates, seen: Seen, now: float) -> dict[str, Any]:
    shard = rates.shard
    at, known = seen.get(shard["shard"], (now, shard))
    is_old = "arena" not in shard and "arena" in known
    meters, figures = [], []
    if (arena := known.get("arena")) is not None:
        meters.append(_meter("memory", arena["resident_bytes"], arena["capacity_bytes"]))
        figures.append(f"{figure(known, 'resident_blocks', tier='host'):,} blocks")
        figures.append(f"{figure(known, 'leased_blocks'):,} leased")
    if (nvme := known.get("nvme")) is not None:
        meters.append(_meter("disk", nvme["file_bytes"], nvme["capacity_bytes"]))
        figures.append(f"{figure(known, 'resident_blocks', tier='nvme'):,} blocks on disk")
    if arena is not None and not is_old:
        figures += [f"{rates.evicted:,.0f} evicted/s", f"{rate_text(rates.staged_bytes)}/s staged"]
        if nvme is not None:
            figures.append(f"{rate_text(rates.written_bytes)}/s to disk")
            figures.append(f"{rate_text(rates.read_bytes)}/s from disk")
    return {
        "name": node_of(known["shard"]),
        "state": state_text(shard),
        "is_healthy": shard["state"] == "serving",
        "message": shard.get("message", ""),
        "old_s": round(now - at, 1) if is_old else None,
        "meters": meters,
        "figures": figures,
    }


def _curve(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kvray size` says, and the curve of the busiest namespace."""
    entries = found["namespaces"][:_CURVES_MAX]
    says = missing_sentences(found)
    for one in entries:
        says.append(f"{sizing_title(one)}: {' '.join(sizing_sentences(one, [one['host_bytes']]))}")
    if not entries:
        return {"says": says, "points": None}
    points = {name: entries[0][name] for name in ("own", "host", "disk", "error")}
    unit, size = ("GiB", 2**30) if entries[0]["sizes"][-1] >= 2**31 else ("MiB", 2**20)
    points |= {"unit": unit, "now": entries[0]["host_bytes"] / size}
    points["sizes"] = [one / size for one in entries[0]["sizes"]]
    return {"says": says, "points": points}


def _meter(name: str, used: int, capacity: int) -> dict[str, Any]:
    text = f"{format_size(used)} of {format_size(capacity)}"
    return {"name": name, "share": min(1.0, used / max(1, capacity)), "text": text}


def plain(part: RenderableType) -> str | dict[str, Any]:
    """Return what a command prints as a text, or as a table of texts."""
    if not isinstance(part, Table):
        return str(part)
    return {
        "columns": [str(plain(column.header)).replace("\n", " ") for column in part.columns],
        "numbers": [column.justify == "right" for column in part.columns],
        "rows": [
            [plain(cell) for cell in row]
            for row in zip(*(column.cells for column in part.columns), strict=True)
        ],
    }
