"""`kvray up` and `kvray down`: start the tier, and a local Ray if there is none; end both."""

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvray.config import KVRayConfig, format_size, load_config, ray_memory_threshold, read_effective
from kvray.console.interrupts import Interrupts, masked
from kvray.console.options import AddressOption, ConfigOption, flag, option
from kvray.console.output import empty_table, printer
from kvray.console.progress import LaunchProgress
from kvray.errors import ConfigError, ShardUnavailable

if TYPE_CHECKING:
    from kvray.actors.tier.launch import Launch
    from kvray.actors.tier.rollout import Rollout

_OBJECT_STORE_BYTES = 2**30
"""Enough for moving blocks by it; kvray keeps none there."""


def up(
    interrupts: Interrupts,
    config: ConfigOption = None,
    address: AddressOption = None,
    port: Annotated[
        int | None, option("N", "Port of the local Ray's head.", 1, 65535, default="a free one")
    ] = None,
    dashboard: Annotated[
        bool, typer.Option(help="Start the local Ray with its dashboard.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            help="Wait until every chosen node has its shard; otherwise nodes may join later."
        ),
    ] = True,
    restart: Annotated[bool, flag("--restart", "Restart all parts, changed or not.")] = False,
    recreate: Annotated[
        bool,
        flag(
            "--recreate",
            "Go on even if arenas must be recreated. Their blocks are lost, except those on disk.",
        ),
    ] = False,
    plan: Annotated[bool, flag("--plan", "Show the changes, and make none.")] = False,
) -> None:
    """Start the tier and wait until it serves; running it again is fine.

    Parts of a running tier that have other settings, or other code than their node has installed,
    restart one node after the other. Arenas stay, and attached engines go on. Without an address,
    this command starts a Ray on this machine that runs until `kvray down`.
    """
    settings, origins, _ = read_effective(config, overrides={"ray.address": address})
    source = origins.of(("ray", "address")).where or "--address"
    for name, given in (("--port", port is not None), ("--dashboard", dashboard)):
        if given and settings.ray.address is not None:
            raise ConfigError(
                f"{name} is for a local Ray, but {source} names the one at"
                f" {settings.ray.address}; leave one of the two out."
            )
    with masked():
        from kvray.actors.tier.launch import bring_up
        from kvray.actors.tier.rollout import Observer, Rollout

    rollout = Rollout(restart=restart, recreate=recreate)
    if plan:
        _show_plan(settings, rollout)
        return
    console = printer(soft_wrap=True)
    done: list[str] = []

    def tell(sentence: str) -> None:
        done.append(sentence)
        console.print(sentence)

    # A signal waits for the next report, so that a half-started Ray is not left behind.
    progress = LaunchProgress(printer(is_error=True), interrupts)
    with progress, interrupts.held():
        launch = bring_up(
            settings,
            port=port,
            dashboard=dashboard,
            observer=Observer(waiting=progress.waiting, report=progress.report, told=tell),
            wait=wait,
            rollout=rollout,
        )
    if not launch.started_ray and (port is not None or dashboard):
        console.print(
            "--port and --dashboard apply when Ray starts, but it ran already. To change them,"
            " run `kvray down` first."
        )
    has_changed = launch.started_tier or bool(done)
    for sentence in _outcome(settings, launch, source, has_changed=has_changed):
        console.print(sentence)


def _show_plan(settings: KVRayConfig, rollout: "Rollout") -> None:
    """Print the changes that would be made; of a tier that does not run, its memory here."""
    from kvray.actors.tier.launch import preview

    console, name = printer(soft_wrap=True), settings.cluster_name
    try:
        planned = preview(settings, rollout)
    except ShardUnavailable:  # such as of a Ray that is not started yet
        _show_memory(console, settings)
        raise
    if planned is None:
        where = "" if settings.ray.address else ", with a Ray on this machine"
        console.print(f"The tier {name} is not running. It would be started{where}.")
        _show_memory(console, settings)
        return
    changes = [
        *(f"{one.name} would be restarted: {'; '.join(one.reasons)}." for one in planned.steps),
        *(f"Node {one[:12]} would get a shard." for one in planned.starts),
        *(
            f"The shard of node {one[:12]} would end, and its blocks in memory would be lost."
            for one in planned.ends
        ),
    ]
    for sentence in changes or [f"The tier {name} is up to date. Nothing would be done."]:
        console.print(sentence)
    if planned.costs:
        console.print(
            f"Blocks would be lost, so this needs --recreate: {'; '.join(planned.costs)}."
        )


def _show_memory(console: Console, settings: KVRayConfig) -> None:
    """Print what a new arena leaves of this node's memory, and the line that starts Ray so.

    CapacityError, ConfigError: it leaves too little, or cannot be there.
    """
    from kvray.actors.tier.ray_node import OBJECT_STORE_BYTES
    from kvray.store import ArenaSpec
    from kvray.store.arena.file import ARENA_FILE, needed_bytes, require_room
    from kvray.store.machine.capacity import MemoryClaims, read_memory, rooms, worker_bytes

    is_local = settings.ray.address is None
    store = OBJECT_STORE_BYTES if is_local else _OBJECT_STORE_BYTES
    claims = MemoryClaims(object_store_bytes=store, threshold=ray_memory_threshold())
    spec, place = ArenaSpec.of(settings, claims), settings.arena.dir
    try:
        if (settings.node_dir / ARENA_FILE).exists():
            return  # which has its memory
        memory, size = read_memory(place), needed_bytes(place, spec)
        title = f"Memory of this node, with {format_size(store)} for Ray's object store"
        table = empty_table("bound", numbers=("size", "in use", "arena", "left"), title=title)
        for room in rooms(memory, size, claims):
            left = room.left - size
            sizes = (room.limit, room.limit - room.left, size, abs(left))
            table.add_row(room.name, *map(format_size, sizes), "" if left >= 0 else "is missing")
        console.print(table)
        require_room(place, spec)
    except OSError as error:
        console.print(f"{error.filename} cannot be looked at ({error.strerror}).")
    else:
        if not is_local:
            address, shard = settings.ray.address or "", settings.shard
            words = ["ray start", f"--address={address}" if ":" in address else "--head"]
            words.append(f"--object-store-memory={store}")
            words.append(f"--memory={worker_bytes(memory, size, claims)}")
            if shard.resource is not None:
                words.append(f"--resources={shlex.quote(json.dumps({shard.resource: 1}))}")
            if shard.label is not None:
                words.append(f"--labels={shlex.quote(shard.label)}")
            console.print(f"It fits with Ray started so:\n  {' '.join(words)}")


def _outcome(
    settings: KVRayConfig, launch: "Launch", source: str, *, has_changed: bool
) -> Iterator[str]:
    """Yield what is up, what is doubtful about the nodes' disks, and where Ray is."""
    serving = [shard for shard in launch.shards if shard["state"] == "serving"]
    capacity = format_size(sum(shard["arena"]["capacity_bytes"] for shard in serving))
    count = f"{len(serving)} shard{'' if len(serving) == 1 else 's'}, {capacity}"
    to_come = len(launch.shards) - len(serving)
    verb = "is up" if has_changed else "was up already"
    rest = f", {to_come} to come" if to_come else ""
    yield f"The tier {settings.cluster_name} {verb}: {count}{rest}."
    disks = [shard["nvme"] for shard in launch.shards if "nvme" in shard]
    remarks = [one for disk in disks for one in (disk["message"], *disk.get("remarks", ())) if one]
    yield from dict.fromkeys(remarks)
    if launch.local is None:
        yield f"Ray: {settings.ray.address} ({source})"
        return
    url = launch.local.dashboard_url
    yield f"Ray: {launch.local.address} (local{f', dashboard at {url}' if url else ''})"


def down(
    interrupts: Interrupts,
    config: ConfigOption = None,
    address: AddressOption = None,
    flush: Annotated[
        bool,
        flag(
            "--flush/--no-flush",
            "First write blocks that are only in memory to the NVMe tier, the most wanted"
            " first, for at most nvme.flush_s.",
        ),
    ] = True,
) -> None:
    """End the tier, free its memory, and end its Ray if `kvray up` started it.

    Running it again is fine. Engines go on without a tier. Blocks on disk stay for the next
    `kvray up`.
    """
    settings = load_config(config, overrides={"ray.address": address})
    with masked():
        from kvray.actors.owner.claim import owner_of
        from kvray.actors.tier.launch import take_down
        from kvray.actors.tier.rollout import Observer

    progress, left = LaunchProgress(printer(is_error=True), interrupts), list[str]()
    observer = Observer(report=progress.flushing, told=left.append)
    with progress, interrupts.held():
        found = take_down(settings, flush=flush, observer=observer)
    owner = owner_of(settings.node_dir)
    if owner is not None and not found:
        raise ShardUnavailable(owner.keeps(settings.node_dir))
    name, console = settings.cluster_name, printer(soft_wrap=True)
    console.print(f"The tier {name} is down." if found else f"No tier {name} was running.")
    for sentence in left if settings.ray.address else ():  # a local Ray's end removes the rest
        console.print(sentence)
    if owner is not None:
        console.print(
            f"{owner} of another Ray cluster owns {settings.node_dir}, which stays; run"
            " `kvray down` with the --address of that cluster."
        )
