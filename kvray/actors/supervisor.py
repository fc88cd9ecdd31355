"""The supervisor: sees to it that every node that should have a shard has one."""

import logging
import os
import threading
from typing import Any

import ray

from kvray.actors.lookup_actor import create_lookup
from kvray.actors.ray_calls import (
    LOOKUP_NAME,
    NAMESPACE,
    SUPERVISOR_NAME,
    call,
    get_actor,
    list_actors,
    log_to_stderr,
    shard_name,
)
from kvray.actors.shard_actor import create_shard
from kvray.config import KVRayConfig
from kvray.errors import KVRayError

_log = logging.getLogger("kvray.supervisor")

_POLL_S = 1.0
_CALL_TIMEOUT_S = 5.0


def plan_nodes(
    nodes: list[dict[str, Any]], present: set[str], resource: str | None
) -> tuple[set[str], set[str]]:
    """Decide where shards are missing and which are gone.

    Args:
        nodes: what `ray.nodes()` returned.
        present: ids of nodes that were given a shard.
        resource: resource that a node must have; None: every node.

    Returns:
        (node ids to start a shard on, node ids whose shard went with its node).
    """
    alive = {
        node["NodeID"]
        for node in nodes
        if node["Alive"] and (resource is None or node["Resources"].get(resource, 0) > 0)
    }
    return alive - present, present - alive


class SupervisorActor:
    """Polls Ray's nodes, for which Ray has no event, and starts shards where some are missing."""

    def __init__(self, config: KVRayConfig) -> None:
        """Reconcile in the background until stopped. Runs again when Ray restarts it."""
        log_to_stderr()
        self._config = config
        self._shards: dict[str, Any] = {}
        self._looked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-supervisor", daemon=True)
        self._thread.start()

    def config(self) -> KVRayConfig:
        """Return the configuration that the tier runs with."""
        return self._config

    def shards(self) -> dict[str, Any]:
        """Return node id -> handle of the shard there, once the nodes were looked at."""
        self._looked.wait(_CALL_TIMEOUT_S)
        return dict(self._shards)

    def stop(self) -> None:
        """Start no more shards."""
        self._stopping.set()
        self._thread.join(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._reconcile()
                    self._looked.set()
                except (KVRayError, ray.exceptions.RayError) as error:
                    _log.warning("will look at the nodes again: %s", error)
                self._stopping.wait(_POLL_S)
        except Exception:  # noqa: BLE001 - the thread's end; it is logged and acted upon
            # Ray starts the supervisor anew, which finds its shards by their names.
            _log.exception("the supervisor ended by a defect")
            os._exit(1)

    def _reconcile(self) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        named = set(list_actors())
        if LOOKUP_NAME not in named:
            _log.warning("the lookup was gone; it is made anew")
            create_lookup(self._config.cluster_name)
        missing, gone = plan_nodes(nodes, set(self._shards), self._config.shard.resource)
        # A shard that was ended for good has no name any more; one that Ray restarts keeps it.
        dead = {node_id for node_id in self._shards if shard_name(node_id) not in named}
        for node_id in sorted(missing | dead - gone):
            self._shards[node_id] = create_shard(node_id, self._config)
            _log.info("node %s has a shard", node_id[:12])
        for node_id in gone:
            _log.warning("node %s is gone, and its blocks with it", node_id[:12])
            del self._shards[node_id]
        self._clean_lookup()

    def _clean_lookup(self) -> None:
        """Have the lookup forget shards of nodes that are gone, also from before a restart."""
        lookup = get_actor(LOOKUP_NAME)
        known = call(lookup.shards, timeout_s=_CALL_TIMEOUT_S)
        for name in set(known) - {shard_name(node_id) for node_id in self._shards}:
            call(lookup.drop, name, timeout_s=_CALL_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"Supervisor({self._config.cluster_name})"


def create_supervisor(config: KVRayConfig) -> Any:
    """Return the tier's supervisor, started if it is not there."""
    return (
        ray.remote(SupervisorActor)
        .options(
            name=SUPERVISOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
        )
        .remote(config)
    )
