"""`kvray config fit`: how arena and Ray share a node's memory, and the line that starts Ray so."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.cli.asking import show_answer
from kvray.config import (
    KVRayConfig,
    format_size,
    parse_size,
    ray_memory_threshold,
    read_effective,
)
from kvray.console.options import (
    ConfigOption,
    JsonOption,
    NodeLabelOption,
    VerboseOption,
    parse_labels,
)
from kvray.console.output import boundary, empty_table, printer
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.store.machine.capacity import MountRoom, NodeMemory
    from kvray.store.machine.fit import Fit

EXIT_UNFIT = 1
_SHM = Path("/dev/shm")
_RAY_THRESHOLD = 0.95
"""Ray's own default, which its command line need not name."""


def _size_option(help_text: str) -> Any:
    return typer.Option(metavar="SIZE", help=help_text, show_default=False)


def fit(
    config: ConfigOption = None,
    node_label: NodeLabelOption = None,
    heap: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory that Ray's workers, engines included, need at least."
        ),
    ] = "1GiB",
    object_store: Annotated[
        str | None, _size_option("Ray's object store; by default what Ray takes, or less.")
    ] = None,
    total: Annotated[
        str | None, _size_option("Memory of another node, instead of this machine.")
    ] = None,
    in_use: Annotated[
        str | None,
        _size_option("Memory of everything else; by default as now, or 2GiB with --total."),
    ] = None,
    shm: Annotated[
        str | None, _size_option("Size of /dev/shm; by default as now, or half of --total.")
    ] = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Share out a node's memory, and print the `ray start` line that makes it fit.

    The node is this machine, unless --total describes another one. An arena that is there already
    counts as free. Needs no Ray: run it before `ray start`.
    """
    with boundary(verbose=verbose):
        labels = parse_labels(node_label)
        settings = read_effective(config, labels=labels).config
        given = {
            "--heap": heap,
            "--object-store": object_store,
            "--total": total,
            "--in-use": in_use,
            "--shm": shm,
        }
        sizes = {name: _parsed(name, one) for name, one in given.items() if one is not None}
        made, largest = _plan(settings, sizes)
        lines = _commands(made, settings, labels)
        found = {**asdict(made), "fits": made.fits, "commands": lines, "largest": largest}
        show_answer(found, lambda _: _print(made, lines, largest), as_json=as_json)
        if not made.fits:
            raise typer.Exit(EXIT_UNFIT)


def _commands(made: "Fit", config: KVRayConfig, labels: dict[str, str]) -> list[str]:
    """Return what to run on a node with these labels, Ray's line last; nothing if nothing helps."""
    from kvray.store.machine.fit import commands

    if not made.fits:
        return []
    address, shard = config.ray.address, config.shard
    words = []
    if made.threshold not in (_RAY_THRESHOLD, 1.0):
        words.append(f"RAY_memory_usage_threshold={made.threshold:g}")
    words += ["ray start", f"--address={address}" if address and ":" in address else "--head"]
    after = []
    if shard.resource is not None:
        after.append(f"--resources={shlex.quote(json.dumps({shard.resource: 1}))}")
    said = list(dict.fromkeys([*(f"{key}={value}" for key, value in labels.items()), shard.label]))
    if given := ",".join(filter(None, said)):
        after.append(f"--labels={shlex.quote(given)}")
    return commands(made, lambda options: " ".join([*words, options, *after]))


def _parsed(option: str, given: str) -> int:
    try:
        size = parse_size(given)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}.") from None
    if option == "--object-store" and size < parse_size("75MiB"):
        raise ConfigError(f"{option} {given} is less than Ray takes; write at least 75MiB.")
    return size


def _plan(config: KVRayConfig, sizes: dict[str, int]) -> tuple["Fit", str]:
    """Return the plan, and the largest arena.capacity that would fit; "" for none."""
    from kvray.store.arena.file import ArenaSpec
    from kvray.store.arena.layout import align
    from kvray.store.machine.capacity import rounded_down
    from kvray.store.machine.fit import MemoryRequest, largest_arena, plan

    spec = ArenaSpec.of(config)
    memory, shm = _node(config, sizes)
    page = memory.pool.page_bytes if memory.pool is not None else os.sysconf("SC_PAGE_SIZE")
    request = MemoryRequest(
        arena_bytes=align(spec.geometry().file_bytes, page),
        heap_bytes=sizes["--heap"],
        object_store_bytes=sizes.get("--object-store"),
        threshold=ray_memory_threshold(),
    )
    room = largest_arena(memory, request)
    return plan(memory, shm, request), rounded_down(spec.largest_capacity(room // page * page))


def _node(config: KVRayConfig, sizes: dict[str, int]) -> tuple["NodeMemory", "MountRoom | None"]:
    """Return the memory of the node that is meant, and its /dev/shm, without the tier's arena."""
    from kvray.store.machine.capacity import MountRoom, NodeMemory, read_memory, read_mount

    total, size = sizes.get("--total"), sizes.get("--shm")
    if total is not None:
        size = total // 2 if size is None else size
        shm: MountRoom | None = MountRoom(point=_SHM, size=size, free=size, is_shm=True)
        available = max(0, total - sizes.get("--in-use", 2 * 2**30))
        mount = shm if config.arena.dir.is_relative_to(_SHM) else None
        return NodeMemory(total=total, available=available, mount=mount), shm
    try:
        memory = _without_arena(read_memory(config.arena.dir), config)
        shm = read_mount(_SHM)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be looked at ({error.strerror}); make it, or choose another"
            " arena.dir."
        ) from None
    if "--in-use" in sizes:
        memory = replace(memory, available=max(0, memory.total - sizes["--in-use"]))
    in_shm = memory.mount is not None and memory.mount.is_shm
    if shm is not None and in_shm:
        shm = memory.mount  # without the arena
    if shm is not None and size is not None:
        shm = replace(shm, size=size, free=max(0, size - (shm.size - shm.free)))
    if shm is not None and in_shm:
        memory, shm = replace(memory, mount=shm), replace(shm, point=_SHM)
    return memory, shm


def _without_arena(memory: "NodeMemory", config: KVRayConfig) -> "NodeMemory":
    """Return the memory with what the tier's present arena takes counted as free."""
    from kvray.store.arena.file import ARENA_FILE

    try:
        taken = (config.node_dir / ARENA_FILE).stat().st_blocks * 512
    except OSError:
        return memory
    pool, mount = memory.pool, memory.mount
    if pool is not None:
        return replace(memory, pool=replace(pool, left=pool.left + taken // pool.page_bytes))
    return replace(
        memory,
        available=min(memory.total, memory.available + taken),
        mount=None if mount is None else replace(mount, free=mount.free + taken),
        cgroups=tuple(replace(one, usage=max(0, one.usage - taken)) for one in memory.cgroups),
    )


def _print(made: "Fit", lines: Sequence[str], largest: str) -> None:
    console = printer()
    numbers = ("size", "in use", "Ray itself", "arena", "object store", "workers", "left")
    table = empty_table("bound", numbers=numbers, title="Memory of this node", folds=True)
    for share in made.shares:
        parts = (share.used, share.ray, share.arena, share.object_store, share.heap)
        sizes = [format_size(part) if part else "" for part in parts]
        left = format_size(share.left) if share.left >= 0 else f"-{format_size(-share.left)}"
        style = "red" if share.left < 0 else None
        table.add_row(share.name, format_size(share.limit), *sizes, left, style=style)
    console.print(table)
    console.print(_verdict(made, largest), soft_wrap=True)
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)


def _verdict(made: "Fit", largest: str) -> str:
    if made.fits and len(made.remounts) + (made.pool is not None):
        return "It fits with these commands, as root, and Ray started like this:"
    if made.fits:
        return "It fits with Ray started like this:"
    remedy = f"lower arena.capacity to {largest}" if largest else "free memory"
    return (
        f"It does not fit: {format_size(made.short_by)} are missing, with an object store of"
        f" {format_size(made.object_store_bytes)}, {format_size(made.heap_bytes)} for Ray's workers"
        f" and a threshold of {made.threshold:g}; {remedy}."
    )
