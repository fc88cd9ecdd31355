"""Nodes that Ray's autoscaler starts and ends: no part of kvray keeps one that nobody uses.

The autoscaler is the real one; its nodes are processes of this machine.
"""

import contextlib
import json
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.lab.chaos.machine import RESOURCE, Machine
from kvray.store import Arena
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.unit.store.small_arena import PATIENT_S, chain, store
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

HEAD_ID = "f" * 51 + "00000"
HEAD_TYPE = "ray.head.default"
"""What the autoscaler's provider calls the head, and its type; it counts its nodes from there."""
IDLE_S = 3.0
START_S = 90.0
BUSY = """
import sys, ray
ray.init(namespace="engines", log_to_driver=False)
@ray.remote(num_cpus=1)
class Engine:
    def ping(self): return 1
engine = Engine.remote()
ray.get(engine.ping.remote())
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    scaling = tmp_path_factory.mktemp("scaling") / "scaling.json"
    scaling.write_text(json.dumps(autoscaling(f"127.0.0.1:{port}")))
    environ = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    options = [f"--port={port}", f"--autoscaling-config={scaling}"]
    settings = {**SETTINGS, "shard": {"release_idle_s": IDLE_S}}
    with (
        Machine(num_nodes=0, has_nvme=True, environ=environ, head_options=options) as machine,
        open_tier(machine, "scaled", settings, "--no-wait") as made,
    ):
        machine.head.arena_dir.mkdir()
        yield made


def autoscaling(address: str) -> dict[str, object]:
    """Return the autoscaler's configuration: one worker if it is needed, none otherwise."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    types = {
        "worker": {"resources": {"CPU": 1, RESOURCE: 1, "object_store_memory": 80 * 2**20}},
        HEAD_TYPE: {"resources": {"CPU": 0}},
    }
    limits = {"worker": 1, HEAD_TYPE: 0}
    unused = ("head_setup", "worker_setup", "setup", "initialization", "head_start_ray")
    return {
        "cluster_name": "scaled",
        "max_workers": 1,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",
            "module": provider,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            name: {**one, "node_config": {}, "min_workers": 0, "max_workers": limits[name]}
            for name, one in types.items()
        },
        **{f"{name}_commands": [] for name in (*unused, "worker_start_ray")},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


@contextlib.contextmanager
def busy(tier: TwoNodes) -> Iterator[None]:
    """Have the cluster run something that needs a worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        env=tier.machine.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "no worker came"
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def is_serving(tier: TwoNodes) -> bool:
    return [one["state"] for one in tier.shards()] == ["serving"]


def num_raylets(tier: TwoNodes) -> int:
    return sum(one.name() == "raylet" for one in tier.machine.head.family())


def test_a_worker_that_nobody_uses_ends_and_the_next_one_finds_its_blocks_on_disk(
    tier: TwoNodes,
) -> None:
    node_dir = tier.node_dir(tier.machine.head)  # the provider's nodes have the head's settings
    keys = chain(40)
    with busy(tier):
        wait_for(lambda: is_serving(tier), "the first worker's shard")
        with contextlib.closing(Arena(node_dir, lock_wait_s=PATIENT_S)) as arena:
            arena.join("test")
            store(arena, keys)
        assert num_raylets(tier) == 2
    wait_for(lambda: num_raylets(tier) == 1, "the end of the worker")
    assert not tier.shards()
    shutil.rmtree(node_dir)  # another machine with the same disk

    with busy(tier):
        wait_for(lambda: is_serving(tier), "the next worker's shard")
        (shard,) = tier.shards()
        assert shard["nvme"]["blocks"] == len(keys)
        assert Path(shard["directory"]) == node_dir
