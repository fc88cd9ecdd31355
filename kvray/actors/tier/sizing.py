"""What memory is worth to the whole tier: the curves of all nodes as one, for each namespace; pure.

A node's curve is of its own replicas' prompts and its own memory. The sizes of all curves are the
same parts of what each node has, so curves add up point by point. A node counts by the prompt
tokens that it sees in a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

WORTH_SHARE = 0.01
"""Memory is worth running if it finds this share of the prompt tokens, which engines have not."""


def combined(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of the `shards` of `Client.status` as plain data, see docs/sizing.md."""
    found = [one["traffic"] for one in shards if "traffic" in one]
    made = [one for one in found if one["namespaces"]]
    names = dict.fromkeys(name for one in made for name in one["namespaces"])
    fields = {name: one for shard in shards for name, one in shard.get("namespaces", {}).items()}
    entries = [_namespace(name, made, fields.get(name, {})) for name in names]
    return {
        "namespaces": sorted(entries, key=lambda one: -one["tokens_per_s"]),
        "nodes": len(found),
        "nodes_with_curve": len(made),
        "age_s": max((one["age_s"] for one in made), default=None),
        "lost_prompts": sum(one["lost_prompts"] for one in found),
    }


def found_with(entry: Mapping[str, Any], size: float) -> dict[str, float] | None:
    """Return the shares host, disk, remote and error of a namespace with memory of `size` bytes.

    Between two points it is a line over the logarithm of the size. None: `size` is beyond the
    largest point, or below the smallest.
    """
    sizes = entry["sizes"]
    if not sizes[0] <= size <= sizes[-1]:
        return None
    after = next(at for at, one in enumerate(sizes) if one >= size)
    before = max(0, after - 1)
    width = math.log(sizes[after] / sizes[before]) if after else 1.0
    part = math.log(size / sizes[before]) / width if width else 0.0
    return {
        name: entry[name][before] + part * (entry[name][after] - entry[name][before])
        for name in ("host", "disk", "remote", "error")
    }


def _namespace(
    name: str, made: Sequence[Mapping[str, Any]], fields: Mapping[str, object]
) -> dict[str, Any]:
    nodes = [one for one in made if name in one["namespaces"]]
    curves = [one["namespaces"][name] for one in nodes]
    speeds = [
        curve["num_tokens"] / max(1.0, node["seconds"])
        for curve, node in zip(curves, nodes, strict=True)
    ]
    weights = [speed / (sum(speeds) or 1.0) for speed in speeds]

    def mean(values: Iterable[float], power: int = 1) -> float:
        pairs = zip(weights, values, strict=True)
        total: float = sum((weight * value) ** power for weight, value in pairs)
        return round(float(total ** (1 / power)), 5)

    points = {
        name: [mean(column, power) for column in zip(*(one[name] for one in curves), strict=True)]
        for name, power in (("host", 1), ("disk", 1), ("remote", 1), ("error", 2))
    }
    shares = {
        name: mean(curve[name] for curve in curves) for name in ("own", "measured", "predicted")
    }
    from kvray.store.sizing import is_sure  # numpy would make every command's start slower

    off = abs(shares["predicted"] - shares["measured"])
    entry = {
        "namespace": name,
        "model": fields.get("model", ""),
        "served": fields.get("served", ""),
        "tokens_per_s": round(sum(speeds), 1),
        "sampled_blocks": sum(curve["sampled_blocks"] for curve in curves),
        **shares,
        "is_sure": is_sure(shares["predicted"], shares["measured"]),
        "host_bytes": sum(one["host_bytes"] for one in nodes),
        "disk_bytes": sum(one["disk_bytes"] for one in nodes),
        "distinct_bytes": sum(one["distinct_bytes"] for one in nodes),
        "seconds": min(one["seconds"] for one in nodes),
        "sizes": [sum(some) for some in zip(*(one["sizes"] for one in nodes), strict=True)],
        **points,
        "error": [max(one, round(off / 2, 5)) for one in points["error"]],
    }
    return {**entry, "worth_from_bytes": _worth_from(entry)}


def _worth_from(entry: Mapping[str, Any]) -> int | None:
    """Return the least memory that is worth running; 0: less than the smallest point; None: none.

    Size by size the share is a line over the logarithm.
    """
    points = list(zip(entry["sizes"], entry["host"], strict=True))
    if points[0][1] >= WORTH_SHARE:
        return 0
    for (size, share), (larger, more) in pairwise(points):
        if more >= WORTH_SHARE:
            part = (WORTH_SHARE - share) / (more - share)
            return int(size * (larger / size) ** part)
    return None
