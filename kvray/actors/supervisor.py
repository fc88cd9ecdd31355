"""The supervisor: sees to it that every node that should have a shard has one."""

import logging
import threading
from typing import Any

import ray

from kvray.actors.ray_calls import LOOKUP_NAME, call, get_actor, shard_name
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
    """Polls Ray's nodes, since Ray has no event for them, and starts shards where some are missing."""

    def __init__(self, config: KVRayConfig) -> None:
        """Reconcile in the background until stopped."""
        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
        self._config = config
        self._shards: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-supervisor", daemon=True)
        self._thread.start()

    def config(self) -> KVRayConfig:
        """Return the configuration that the tier runs with."""
        return self._config

    def shards(self) -> dict[str, Any]:
        """Return node id -> handle of the shard there."""
        return dict(self._shards)

    def stop(self) -> None:
        """Start no more shards."""
        self._stopping.set()
        self._thread.join(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._reconcile()
            except (KVRayError, ray.exceptions.RayError) as error:
                _log.warning("kvray: will look at the nodes again: %s", error)
            self._stopping.wait(_POLL_S)

    def _reconcile(self) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        missing, gone = plan_nodes(nodes, set(self._shards), self._config.shard.resource)
        for node_id in sorted(missing):
            self._shards[node_id] = create_shard(node_id, self._config)
        for node_id in gone:
            _log.warning("kvray: node %s is gone and its blocks with it", node_id[:12])
            del self._shards[node_id]
            call(get_actor(LOOKUP_NAME).drop, shard_name(node_id), timeout_s=_CALL_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"Supervisor({self._config.cluster_name})"
