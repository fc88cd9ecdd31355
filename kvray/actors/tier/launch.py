"""Brings a tier up from nothing, and ends it: Ray if need be, the actors, the files.

All or nothing: a start that fails or is interrupted ends all that it started, and nothing else. An
arena that was there stays: its tier may have ended with its Ray.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.actors.owner.admin import ask_to_be_admitted, proof_of
from kvray.actors.owner.claim import owner_of
from kvray.actors.owner.inventory import naming_unused
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.calls import list_actors
from kvray.actors.tier import connection, local_ray, tier
from kvray.actors.tier.changes import Plan
from kvray.actors.tier.rollout import SILENT, Observer, Rollout, look
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, ShardUnavailable
from kvray.store import ArenaSpec
from kvray.store.arena.file import ARENA_FILE, require_room
from kvray.store.machine.access import OWN_USER


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The result of `bring_up`; this process is connected to Ray."""

    shards: list[dict[str, Any]]
    started_ray: bool
    started_tier: bool
    local: local_ray.LocalRay | None
    """The local cluster, if the tier is on one."""
    undo: contextlib.ExitStack
    """Closing it disconnects, and ends what this call started."""


def bring_up(
    config: KVRayConfig,
    *,
    port: int | None = None,
    dashboard: bool = False,
    die_with_parent: bool = False,
    observer: Observer = SILENT,
    wait: bool = True,
    rollout: Rollout | None = None,
) -> Launch:
    """Connect to Ray, or start one if the configuration names none, and start the tier.

    If it raises, or the observer does, all that this call started has ended.
    """
    proof_of(config)  # raises before anything starts
    with contextlib.ExitStack() as undo:
        local = None
        started_ray = is_up = False
        if config.ray.address is None:
            local = local_ray.find(config.cluster_name)
            if local is None:
                had_arena = os.path.exists(config.node_dir / ARENA_FILE)
                local = local_ray.start(
                    config.cluster_name,
                    port=port,
                    dashboard=dashboard,
                    die_with_parent=die_with_parent,
                    check=lambda: _require_place(config),
                    waiting=observer.waiting,
                )
                started_ray = True
                undo.callback(lambda: _end_local_ray(config, keep=had_arena and not is_up))
        undo.callback(connection.disconnect)
        connection.connect_configured(config)
        started_tier, timeout_s = not list_actors(), config.ray.timeout_s
        if started_tier:
            undo.callback(lambda: tier.down(timeout_s=timeout_s, config=config, only_new=not is_up))
        shards = tier.up(config, timeout_s=timeout_s, observer=observer, wait=wait, rollout=rollout)
        is_up = True
        return Launch(
            shards=shards,
            started_ray=started_ray,
            started_tier=started_tier,
            local=local,
            undo=undo.pop_all(),
        )


def preview(config: KVRayConfig, rollout: Rollout) -> Plan | None:
    """Return the changes that `bring_up` would make to the tier that runs; None: none runs."""
    proof_of(config)
    if config.ray.address is None and local_ray.find(config.cluster_name) is None:
        return None
    try:
        connection.connect_configured(config)
        if not list_actors():
            return None
        return look(config, rollout, timeout_s=config.ray.timeout_s, observer=SILENT)
    finally:
        connection.disconnect()


def take_down(config: KVRayConfig, *, flush: bool = True, observer: Observer = SILENT) -> bool:
    """End the tier with its arenas and, if it is local, its Ray; False if there was nothing.

    That includes a local Ray that has died or hangs. ConfigError: the tier asks for a token that
    `config` does not name, or is another user's.
    """
    is_local = config.ray.address is None
    if is_local and local_ray.find(config.cluster_name) is None:
        _refuse_foreign(config.node_dir)
        return _end_local_ray(config)
    found = is_local
    with contextlib.ExitStack() as undo:
        if is_local:
            undo.callback(_end_local_ray, config)
            undo.enter_context(contextlib.suppress(ShardUnavailable))
        undo.callback(connection.disconnect)
        connection.connect_configured(config)
        timeout_s = config.ray.timeout_s
        try:
            ask_to_be_admitted(config, timeout_s=timeout_s)
        except ConfigError:
            undo.pop_all()  # who may not end the tier does not end its Ray either
            connection.disconnect()
            raise
        found = tier.down(timeout_s=timeout_s, config=config, flush=flush, observer=observer)
        found = found or is_local
    return found


@contextlib.contextmanager
def local_tier(config: KVRayConfig, *, observer: Observer = SILENT) -> Iterator[Launch]:
    """Have a tier during a block: the one that runs, else one that ends with the block."""
    launch = bring_up(config, die_with_parent=True, observer=observer)
    with launch.undo:
        yield launch


def _require_place(config: KVRayConfig) -> None:
    """Raise at once what the shard of a local Ray would raise half a minute later."""
    directory = config.node_dir
    _refuse_foreign(directory)
    if (owner := owner_of(directory)) is not None:
        raise ShardUnavailable(owner.keeps(directory))
    if not (directory / ARENA_FILE).exists():
        # An OSError is of arena.dir, which the shard names.
        with contextlib.suppress(OSError), naming_unused(config.arena.dir):
            require_room(config.arena.dir, ArenaSpec.of(config))


def _refuse_foreign(directory: Path) -> None:
    """Raise ConfigError for the directory of another user's tier."""
    with contextlib.suppress(FileNotFoundError):
        OWN_USER.check_own(directory)


def _end_local_ray(config: KVRayConfig, *, keep: bool = False) -> bool:
    """End the local Ray, and remove its files and those of its actors; False: there were none.

    `keep`: those of its actors stay.
    """
    directory = local_ray.local_dir(config.cluster_name)
    found = directory.exists() or config.node_dir.exists()
    was_running = local_ray.stop(config.cluster_name)
    if keep:
        return found
    # The arena stays if a shard of another Ray on this node owns it.
    return sweep(config.node_dir, tier.SWEEP_WAIT_S if was_running else 0.0) and found
