"""CPU of the supervisor's rounds in a tier of many nodes: `python -m tests.ray.many_nodes 3000`.

The nodes are entries in the table of a Ray of its own, which runs none of them, and all parts are
one actor that answers. Lookup and round are the tier's own.
"""

import os
import statistics
import sys
import time
from typing import Any

import grpc
import ray
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from kvray.actors.lookup.actor import create_lookup
from kvray.actors.lookup.lookup import Announcement
from kvray.actors.names import mover_name, namespace_of, shard_name
from kvray.actors.supervisor import supervisor
from kvray.config import KVRayConfig

_NEVER_MS = "36000000"
_ALONE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_initial_delay_ms": _NEVER_MS,
    "RAY_health_check_period_ms": _NEVER_MS,
}
_ROUNDS = 20


class Part:
    """Answers for all parts."""

    async def ping(self) -> bool:
        """Answer that it does not start."""
        return False


class Rounds(supervisor.SupervisorActor):
    """A supervisor that makes its rounds when it is told to."""

    def _run(self) -> None:
        pass

    def go(self) -> float:
        """Return the CPU seconds of a round."""
        began = time.process_time()
        self._reconcile()
        return time.process_time() - began


def main(num_nodes: int) -> None:
    """Print the CPU of a round."""
    os.environ.update(_ALONE)
    ray_context = ray.init(
        num_cpus=1, include_dashboard=False, namespace=namespace_of("many"), log_to_driver=False
    )
    part: Any = ray.remote(num_cpus=0)(Part).remote()  # type: ignore[call-overload]
    ray.get(part.ping.remote())
    lookup = create_lookup("many", silent_s=3600)
    ray.get(lookup.shards.remote())
    node_ids = [os.urandom(28) for _ in range(num_nodes)]
    _enter(ray_context.address_info["gcs_address"], node_ids)
    names = []
    for node_id in map(bytes.hex, node_ids):
        names += [shard_name(node_id), mover_name(node_id)]
        one = Announcement(
            shard=shard_name(node_id),
            arena_id="",
            shard_epoch=1,
            sequence=1,
            full=True,
            added_keys=b"",
            added_parts=b"",
            removed_keys=b"",
            removed_parts=b"",
        )
        ray.get(lookup.announce.remote(one))
    for name in names:  # they wait for a resource that no node has
        never = ray.remote(num_cpus=0, resources={"never": 1})(Part)  # type: ignore[call-overload]
        never.options(name=name, lifetime="detached").remote()
    for create in ("create_shard", "create_mover"):
        setattr(supervisor, create, lambda node_id, config: part)
    rounds = Rounds(
        KVRayConfig.model_validate({"cluster_name": "many", "shard": {"resource": "kv"}})
    )
    rounds.go()
    taken = []
    for _ in range(_ROUNDS):
        taken.append(rounds.go())
        time.sleep(1)
    mean, most = (1000 * one for one in (statistics.mean(taken), max(taken)))
    print(f"{len(names)} parts: {mean:.0f} ms of CPU a round, at most {most:.0f} ms")
    ray.shutdown()


def _enter(address: str, node_ids: list[bytes]) -> None:
    table = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(grpc.insecure_channel(address))
    for node_id in node_ids:
        info = gcs_pb2.GcsNodeInfo(
            node_id=node_id, node_manager_address="127.0.0.1", node_manager_port=1, state=0
        )
        resources = {"CPU": 64, "GPU": 8, "memory": 1e12, "object_store_memory": 1e10, "kv": 1}
        for name, value in resources.items():
            info.resources_total[name] = value
        table.RegisterNode(gcs_service_pb2.RegisterNodeRequest(node_info=info))


if __name__ == "__main__":
    main(int(sys.argv[1]))
