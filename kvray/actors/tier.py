"""The tier as a whole on a Ray cluster that this process is connected to: up, status, down."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray

from kvray.actors.lookup import LookupActor
from kvray.actors.ray_calls import (
    LOOKUP_NAME,
    NAMESPACE,
    SUPERVISOR_NAME,
    call,
    get_actor,
    mapped_errors,
)
from kvray.actors.supervisor import SupervisorActor
from kvray.config import KVRayConfig
from kvray.errors import CapacityError, ConfigError, KVRayError, ShardUnavailable

Report = Callable[[list[dict[str, Any]]], None]
"""Called with the shards' statuses while they get ready."""

_POLL_S = 0.1


def up(
    config: KVRayConfig, *, timeout_s: float, report: Report = lambda shards: None
) -> list[dict[str, Any]]:
    """Start what is missing of the tier and wait until every shard serves; again is fine.

    Returns:
        The shards' statuses.

    Raises:
        ConfigError: another tier runs in this Ray cluster.
        CapacityError: a shard could not get its memory.
        ShardUnavailable: the shards were not ready within `timeout_s`.
    """
    options = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
    }
    deadline = time.monotonic() + timeout_s
    with mapped_errors():
        lookup = (
            ray.remote(LookupActor).options(name=LOOKUP_NAME, **options).remote(config.cluster_name)
        )
        supervisor = (
            ray.remote(SupervisorActor).options(name=SUPERVISOR_NAME, **options).remote(config)
        )
    there = call(lookup.cluster_name, timeout_s=timeout_s)
    running = call(supervisor.config, timeout_s=timeout_s)
    if there != config.cluster_name:
        raise ConfigError(
            f"The namespace {NAMESPACE!r} of this Ray cluster is in use by the tier {there!r}; run"
            f" `kvray down` for it first, or set cluster_name to {there!r}."
        )
    if running != config:
        raise ConfigError(
            f"The tier {there!r} is running with other settings; run `kvray down`, then `kvray up`"
            " again."
        )
    while True:
        shards = _shard_statuses(supervisor, max(1.0, deadline - time.monotonic()))
        report(shards)
        for shard in shards:
            if shard["state"] == "failed":
                raise CapacityError(shard["message"])
        if shards and all(shard["state"] == "serving" for shard in shards):
            return shards
        if time.monotonic() > deadline:
            raise ShardUnavailable(
                f"The shards were not ready within {timeout_s:.0f} s; see `kvray status`."
            )
        time.sleep(_POLL_S)


def status(*, timeout_s: float) -> dict[str, Any]:
    """Return what the tier's parts say of themselves.

    Raises:
        ShardUnavailable: no tier runs in this Ray cluster.
    """
    supervisor = get_actor(SUPERVISOR_NAME)
    config: KVRayConfig = call(supervisor.config, timeout_s=timeout_s)
    return {
        "cluster_name": config.cluster_name,
        "lookup": call(get_actor(LOOKUP_NAME).status, timeout_s=timeout_s),
        "shards": _shard_statuses(supervisor, timeout_s),
    }


def clear(*, timeout_s: float) -> int:
    """Evict every block that nobody leases, on every node; return how many."""
    shards = call(get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s)
    return sum(call(shard.clear, timeout_s=timeout_s) for shard in shards.values())


def down(*, timeout_s: float) -> bool:
    """End the tier and remove its arenas; False if there was none. Again is fine."""
    found = False
    with contextlib.suppress(KVRayError):
        supervisor = get_actor(SUPERVISOR_NAME)
        found = True
        call(supervisor.stop, timeout_s=timeout_s)
        shards = call(supervisor.shards, timeout_s=timeout_s)
        ray.kill(supervisor)
        stopping = [(shard, shard.stop.remote(True)) for shard in shards.values()]
        deadline = time.monotonic() + timeout_s
        for shard, stopped in stopping:
            with contextlib.suppress(KVRayError), mapped_errors():
                ray.get(stopped, timeout=max(0.1, deadline - time.monotonic()))
            ray.kill(shard)
    with contextlib.suppress(KVRayError):
        ray.kill(get_actor(LOOKUP_NAME))
        found = True
    return found


def _shard_statuses(supervisor: Any, timeout_s: float) -> list[dict[str, Any]]:
    """Return every shard's status; one that does not answer says so."""
    shards = call(supervisor.shards, timeout_s=timeout_s)
    statuses = []
    for node_id, shard in shards.items():
        try:
            statuses.append(call(shard.status, timeout_s=timeout_s))
        except ShardUnavailable as error:
            statuses.append({"shard": node_id[:12], "state": "unreachable", "message": str(error)})
    return statuses
