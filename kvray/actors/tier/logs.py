"""What the parts of the tier have logged, on all nodes: merged, and followed.

A task on each node reads the files there. So the lines of a part that is frozen, or that crashed,
are told as well, and nobody needs Ray's dashboard.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import ray

from kvray.actors.names import (
    KINDS,
    LOOKUP_NAME,
    NAMESPACE_PREFIX,
    PART_PREFIX,
    SUPERVISOR_NAME,
    is_lookup,
    mover_name,
    shard_name,
)
from kvray.actors.ray_glue import calls
from kvray.actors.ray_glue.private import logs_dir
from kvray.actors.telemetry.log_files import LogEntry, LogFiles
from kvray.errors import ConfigError, KVRayError, ShardUnavailable

_PING_S = 1.0
_ROUND_S = 1.0
_NODE_DIGITS_MIN = 4


def read_logs(
    part: str | None, *, last: int, follow: bool, timeout_s: float
) -> Iterator[tuple[list[LogEntry], list[str]]]:
    """Give entries, the `last` so far first, and sentences about parts and nodes that are silent.

    `part`: a kind, a part or a node; None: all. With `follow` it goes on, in rounds of a second,
    also with nodes that come. A node has `timeout_s` for its first entries.

    Raises:
        ConfigError: no part or node is named so.
        ShardUnavailable: no tier runs there, or no node answers.
    """
    tasks: dict[Any, str] = {}
    asked: set[str] = set()
    tier = calls.current_namespace().removeprefix(NAMESPACE_PREFIX)
    while follow or not asked:
        is_first = not asked
        living = calls.list_actors() or [calls.get_actor(SUPERVISOR_NAME)]  # raises: no tier runs
        found = homes(ray.nodes(), living, part)  # type: ignore[no-untyped-call]
        for node_id in found.keys() - asked:
            tasks[calls.on_node(node_id, _tell).remote(tier, found[node_id], last, follow)] = (
                node_id
            )
        asked |= found.keys()
        silent = _silent_parts(set[str]().union(*found.values())) if is_first else []
        entries, lost = _take(tasks, timeout_s if is_first else _ROUND_S, is_first=is_first)
        yield (entries[-last:] if is_first else entries), silent + lost


def _take(
    tasks: dict[Any, str], wait_s: float, *, is_first: bool
) -> tuple[list[LogEntry], list[str]]:
    """Return what the tasks tell within `wait_s`, and sentences about nodes that tell nothing."""
    entries, remarks = list[LogEntry](), list[str]()
    ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=wait_s)
    for task in tasks.keys() & set(ready):
        try:
            with calls.mapped_errors():
                entries += ray.get(next(task), timeout=wait_s)
        except KVRayError as error:
            remarks.append(f"Node {tasks.pop(task)[:12]} tells no lines: {error}")
    remarks += [
        f"Node {tasks[task][:12]} told no lines within {wait_s:.0f} s; see with `ray status` if its"
        " Ray runs, or read worker-*.err in the logs of its Ray there."
        for task in tasks.keys() & set(late)
        if is_first  # later it has nothing new to tell
    ]
    if not tasks or (is_first and len(late) == len(tasks)):
        raise ShardUnavailable(remarks[-1])
    return sorted(entries, key=lambda one: one.time_s), remarks


def _silent_parts(names: Set[str]) -> list[str]:
    return [
        f"{name} does not answer now; see `kvray status`, and what it said last."
        for name, answer in calls.ask(sorted(names), "ping", _PING_S).items()
        if isinstance(answer, KVRayError)
    ]


def homes(
    nodes: Sequence[Mapping[str, Any]], living: Collection[str], part: str | None
) -> dict[str, set[str]]:
    """Return node id -> the parts there whose lines are wanted; no node without one.

    ConfigError: no part or node is named `part`.
    """
    found = {}
    for node in nodes:
        node_id = node["NodeID"]
        parts = {shard_name(node_id), mover_name(node_id)}.intersection(living)
        if calls.HEAD_RESOURCE in node["Resources"]:
            parts |= {LOOKUP_NAME, SUPERVISOR_NAME, *filter(is_lookup, living)}
        wanted = {name for name in parts if part is None or _is_named(part, name, node_id)}
        if node["Alive"] and wanted:
            found[node_id] = wanted
    if not found:
        raise ConfigError(
            f"No part or node of the tier is called {part!r:.80}; write {', '.join(KINDS)}, or a"
            " node as `kvray status` has it."
        )
    return found


def _is_named(part: str, name: str, node_id: str) -> bool:
    """Return whether `part` means the part of that name: its kind, itself, or its node."""
    short, part = name.removeprefix(PART_PREFIX), part.removeprefix(PART_PREFIX)
    if short == part or (part in KINDS and short.startswith(f"{part}-")):
        return True
    return len(part) >= _NODE_DIGITS_MIN and node_id.startswith(part)


def _tell(tier: str, parts: set[str], last: int, follow: bool) -> Iterator[list[LogEntry]]:
    """Give the newest entries of this node, at most `last`, and then what comes."""
    files = LogFiles(Path(logs_dir()), tier=tier, parts=parts)
    yield files.read()[-last:]
    while follow:
        time.sleep(_ROUND_S)
        if fresh := files.read():
            yield fresh
