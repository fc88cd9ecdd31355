"""A tier on several nodes of this machine, asked and driven by processes of their own.

This process may be connected to another Ray: what is to be asked of this one goes through
`Machine.run`, and engines get the environment of their node.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.config import environ_for
from kvray.lab.chaos.machine import PAIR, RESOURCE, Machine, Node
from kvray.reference.engine_options import KvConnectorConfig

CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)
"""What a replica is started with, so that it uses the tier."""

SETTINGS: dict[str, dict[str, Any]] = {
    "arena": {"capacity": "64MiB", "slab": "16MiB", "lock_wait_s": 0.05},
    "connector": {"model_key": "tiny", "verify_on_load": "always"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    """A tier that is up on the nodes of a machine."""

    machine: Machine
    config_path: Path
    cluster_name: str = "nodes"
    num_nodes: int = 2

    @property
    def nodes(self) -> list[Node]:
        """The nodes that have a shard."""
        return self.machine.nodes[: self.num_nodes]

    def node_dir(self, node: Node) -> Path:
        """Return where a node's arena and socket are."""
        return node.arena_dir / f"kvray-{self.cluster_name}"

    def engine_environ(self, node: Node) -> dict[str, str]:
        """Return the variables with which an engine finds the tier of its node."""
        return {**environ_for(self.config_path), "KVRAY_ARENA__DIR": str(node.arena_dir)}

    def shards(self) -> list[dict[str, Any]]:
        """Return what `kvray status` says of the shards; nothing while the tier's head is gone."""
        done = self.machine.run("status", "--json", "-c", str(self.config_path))
        return list(json.loads(done.stdout)["shards"]) if done.returncode == 0 else []

    def serving(self) -> dict[str, dict[str, Any]]:
        """Return directory -> what `kvray status` says, of the shards that serve."""
        return {one["directory"]: one for one in self.shards() if one["state"] == "serving"}


@contextlib.contextmanager
def open_tier(
    machine: Machine,
    cluster_name: str,
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS,
    *options: str,
    num_nodes: int = 2,
) -> Iterator[TwoNodes]:
    """Have a tier on the first two nodes of a machine, or all, for the time of a block.

    The machine may have others after it.
    """
    resource = PAIR if num_nodes == 2 else RESOURCE
    path = machine.write_config(settings, cluster_name=cluster_name, resource=resource)
    try:
        up = machine.run("up", *options, "-c", str(path))
        assert up.returncode == 0, up.stderr
        yield TwoNodes(
            machine=machine, config_path=path, cluster_name=cluster_name, num_nodes=num_nodes
        )
    finally:
        down = machine.run("down", "-c", str(path))
    assert down.returncode == 0, down.stderr


@contextlib.contextmanager
def open_two_nodes(
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS, **options: Any
) -> Iterator[TwoNodes]:
    """Have a tier on a new `Machine`, made with `options`, for the time of a block."""
    with Machine(**options) as machine, open_tier(machine, "nodes", settings) as nodes:
        yield nodes
