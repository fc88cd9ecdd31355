"""`kvray config fit`: whether arena and Ray fit into a node's memory, and how Ray is started so."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvray.cli.boundary import boundary
from kvray.cli.options import ConfigOption, NodeLabelOption, VerboseOption, parse_labels
from kvray.config import (
    KVRayConfig,
    format_size,
    parse_size,
    ray_memory_threshold,
    read_effective,
)
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.store.capacity import MountRoom, NodeMemory
    from kvray.store.fit import Fit

EXIT_UNFIT = 1
_SHM = Path("/dev/shm")
_RAY_THRESHOLD = 0.95
"""Ray's own default, which need not be said."""


def _size_option(help_text: str) -> Any:
    return typer.Option(metavar="SIZE", help=help_text, show_default=False)


def fit(
    config: ConfigOption = None,
    node_label: NodeLabelOption = None,
    heap: Annotated[
        str,
        typer.Option(metavar="SIZE", help="What Ray's workers, engines among them, need at least."),
    ] = "1GiB",
    object_store: Annotated[
        str | None, _size_option("Ray's object store; else what Ray takes, or less.")
    ] = None,
    total: Annotated[
        str | None, _size_option("Memory of a node that is meant in place of this machine.")
    ] = None,
    in_use: Annotated[
        str | None,
        _size_option("What everything else takes there; else as now, and 2GiB with --total."),
    ] = None,
    shm: Annotated[
        str | None, _size_option("Size of /dev/shm there; else as it is, and half with --total.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show who gets how much of a node's memory, and the `ray start` line with which it fits.

    Without --total it is this machine, without the arena that may be there already. Needs no Ray,
    and best runs before it. Exits with 1 if nothing makes it fit.
    """
    with boundary(verbose=verbose):
        labels = parse_labels(node_label)
        settings = read_effective(config, labels=labels).config
        sizes = {
            name: _parsed(name, given)
            for name, given in (
                ("--heap", heap),
                ("--object-store", object_store),
                ("--total", total),
                ("--in-use", in_use),
                ("--shm", shm),
            )
            if given is not None
        }
        made, largest = _plan(settings, sizes)
        start = _StartLine(settings, labels, made.threshold)
        lines = start.after(made)
        if as_json:
            answer = {**asdict(made), "fits": made.fits, "commands": lines, "largest": largest}
            print(json.dumps(answer, indent=2, default=str))
        else:
            _print(made, lines, largest)
        if not made.fits:
            raise typer.Exit(EXIT_UNFIT)


class _StartLine:
    """The `ray start` line of one node."""

    def __init__(self, config: KVRayConfig, labels: dict[str, str], threshold: float) -> None:
        """Start a node of this tier that has these labels."""
        self._config, self._labels, self._threshold = config, labels, threshold

    def after(self, made: "Fit") -> list[str]:
        """Return what to run, Ray's line last; nothing where nothing helps."""
        from kvray.store.fit import commands

        return commands(made, self._line) if made.fits else []

    def _line(self, options: str) -> str:
        words = []
        if self._threshold not in (_RAY_THRESHOLD, 1.0):
            words.append(f"RAY_memory_usage_threshold={self._threshold:g}")
        address, shard = self._config.ray.address, self._config.shard
        is_known = address is not None and ":" in address
        words += ["ray start", f"--address={address}" if is_known else "--head", options]
        if shard.resource is not None:
            words.append(f"--resources={shlex.quote(json.dumps({shard.resource: 1}))}")
        labels = [f"{key}={value}" for key, value in self._labels.items()]
        if shard.label is not None and shard.label not in labels:
            labels.append(shard.label)
        if labels:
            words.append(f"--labels={shlex.quote(','.join(labels))}")
        return " ".join(words)


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
    from kvray.store.arena_file import ArenaSpec
    from kvray.store.capacity import rounded_down
    from kvray.store.fit import Wishes, largest_arena, plan
    from kvray.store.layout import align

    spec = ArenaSpec.of(config)
    memory, shm = _node(config, sizes)
    page = memory.pool.page_bytes if memory.pool is not None else os.sysconf("SC_PAGE_SIZE")
    wishes = Wishes(
        arena_bytes=align(spec.geometry().file_bytes, page),
        heap_bytes=sizes["--heap"],
        object_store_bytes=sizes.get("--object-store"),
        threshold=ray_memory_threshold(),
    )
    room = largest_arena(memory, wishes)
    return plan(memory, shm, wishes), rounded_down(spec.largest_capacity(room // page * page))


def _node(config: KVRayConfig, sizes: dict[str, int]) -> tuple["NodeMemory", "MountRoom | None"]:
    """Return what the node that is meant has, and its /dev/shm, without the tier's arena."""
    from kvray.store.capacity import MountRoom, NodeMemory, read_memory, read_mount

    total, in_shm = sizes.get("--total"), config.arena.dir.is_relative_to(_SHM)
    if total is not None:
        size = sizes.get("--shm", total // 2)
        shm: MountRoom | None = MountRoom(point=_SHM, size=size, free=size, is_shm=True)
        available = max(0, total - sizes.get("--in-use", 2 * 2**30))
        return NodeMemory(total=total, available=available, mount=shm if in_shm else None), shm
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
    if shm is not None and memory.mount is not None and memory.mount.is_shm:
        shm = memory.mount if "--shm" not in sizes else _resized(memory.mount, sizes["--shm"])
        return replace(memory, mount=shm), replace(shm, point=_SHM)
    if shm is not None and "--shm" in sizes:
        shm = _resized(shm, sizes["--shm"])
    return memory, shm


def _resized(mount: "MountRoom", size: int) -> "MountRoom":
    return replace(mount, size=size, free=max(0, size - (mount.size - mount.free)))


def _without_arena(memory: "NodeMemory", config: KVRayConfig) -> "NodeMemory":
    """Return what there is once the arena that this tier has there now is counted as free."""
    from kvray.store.arena_file import ARENA_FILE

    try:
        taken = (config.node_dir / ARENA_FILE).stat().st_blocks * 512
    except OSError:
        return memory
    if memory.pool is not None:
        pages = memory.pool.left + taken // memory.pool.page_bytes
        return replace(memory, pool=replace(memory.pool, left=pages))
    mount = memory.mount
    return replace(
        memory,
        available=min(memory.total, memory.available + taken),
        mount=None if mount is None else replace(mount, free=mount.free + taken),
        cgroups=tuple(replace(one, usage=max(0, one.usage - taken)) for one in memory.cgroups),
    )


def _print(made: "Fit", lines: Sequence[str], largest: str) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(title="Memory of this node", title_justify="left", box=box.SIMPLE)
    table.add_column("bound", overflow="fold")
    for name in ("size", "in use", "Ray itself", "arena", "object store", "workers", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in made.shares:
        parts = (share.used, share.ray, share.arena, share.object_store, share.heap)
        sizes = [format_size(part) if part else "" for part in parts]
        left = format_size(share.left) if share.left >= 0 else f"-{format_size(-share.left)}"
        style = "red" if share.left < 0 else None
        table.add_row(escape(share.name), format_size(share.limit), *sizes, left, style=style)
    console.print(table)
    console.print(escape(_verdict(made, largest)), soft_wrap=True)
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, markup=False)


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
