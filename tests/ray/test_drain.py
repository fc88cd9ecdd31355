"""Nodes that go, by `kvray drain`, as Ray says, or unused: their blocks are on others then."""

import contextlib
import json
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import RESOURCE, Machine, Node
from tests.kit.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.kit.ray.command_line import free_port
from tests.unit.store.small_arena import chain, store
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.ray

NUM_CHAINS, LENGTH = 12, 16


@pytest.fixture(scope="module")
def tier(machine: Machine, taken_away: list[Node]) -> Iterator[TwoNodes]:
    with open_tier(machine, "drained", SETTINGS, num_nodes=3) as made:
        yield made
    for node in taken_away:  # Ray takes no drain back, and the machine is not this module's alone
        node.kill()
        node.start()


@pytest.fixture(scope="module")
def taken_away() -> list[Node]:
    """The nodes that Ray was told to drain."""
    return []


def filled(tier: TwoNodes, node: Node, name: str) -> list[list[BlockKey]]:
    """Store chains on a node, and return their keys."""
    chains = [chain(LENGTH, seed=f"{name} {at}") for at in range(NUM_CHAINS)]
    with tier.arena_of(node) as arena:
        for keys in chains:
            store(arena, keys)
    return chains


def num_held(tier: TwoNodes, node: Node, chains: list[list[BlockKey]]) -> int:
    """Return how many whole chains a node has."""
    with tier.arena_of(node) as arena:
        return sum(arena.match(keys) == LENGTH for keys in chains)


def node_id_of(tier: TwoNodes, node: Node) -> str:
    directory = str(tier.node_dir(node))
    (found,) = (one["node_id"] for one in tier.shards() if one["directory"] == directory)
    return str(found)


def drain_of(tier: TwoNodes, node_id: str) -> dict[str, object]:
    (found,) = (one for one in tier.shards() if one["node_id"] == node_id)
    return dict(found.get("drain") or {})


def test_a_node_that_is_drained_by_hand_gives_others_what_only_it_has(tier):
    first, *others = tier.nodes
    chains = filled(tier, first, "by hand")
    node_id = node_id_of(tier, first)

    assert "may: 192 blocks" in tier.say("drain", node_id[:12], "--deadline", "60")
    shares = [num_held(tier, node, chains) for node in others]
    assert sum(shares) == NUM_CHAINS
    assert all(shares), "both of them take some"
    assert drain_of(tier, node_id)["by"] == ["kvray drain"]
    assert "is to go" in tier.say("status")
    tier.say("drain", node_id[:12], "--cancel")
    assert not drain_of(tier, node_id)
    wrong = tier.machine.run("drain", "0123", "-c", str(tier.config_path))
    assert wrong.returncode == 2
    assert node_id[:12] in wrong.stderr


@pytest.mark.long
def test_a_node_that_ray_takes_away_gives_others_what_only_it_has(tier, taken_away):
    going, *others = reversed(tier.nodes)
    taken_away.append(going)
    chains = filled(tier, going, "by Ray")
    node_id = node_id_of(tier, going)

    done = tier.machine.begin(
        "ray.scripts.scripts",
        "drain-node",
        f"--address={tier.machine.address}",
        f"--node-id={node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=spot",
        "--deadline-remaining-seconds=60",
    )
    assert done.wait(HANG_S) == 0

    wait_for(
        lambda: sum(num_held(tier, node, chains) for node in others) == NUM_CHAINS,
        "the blocks' way to other nodes",
    )
    wait_for(
        lambda: not {node_id, None} & {one.get("node_id") for one in tier.shards()},
        "the end of a shard that no engine uses",
    )
    assert not going.actors("Mover")
    assert going.is_running, "it is Ray's business when the node goes"


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


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[TwoNodes]:
    port = free_port()
    scaling = tmp_path / "scaling.json"
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
def busy(scaled: TwoNodes) -> Iterator[None]:
    """Have the cluster run something that needs a worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        env=scaled.machine.environ(),
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


def is_serving(scaled: TwoNodes) -> bool:
    return [one["state"] for one in scaled.shards()] == ["serving"]


def num_raylets(scaled: TwoNodes) -> int:
    return sum(one.name() == "raylet" for one in scaled.machine.head.family())


@pytest.mark.long
def test_a_worker_that_nobody_uses_ends_and_the_next_one_finds_its_blocks_on_disk(scaled):
    node_dir = scaled.node_dir(scaled.machine.head)  # the provider's nodes have the head's settings
    keys = chain(40)
    with busy(scaled):
        wait_for(lambda: is_serving(scaled), "the first worker's shard")
        with scaled.arena_of(scaled.machine.head) as arena:
            store(arena, keys)
        assert num_raylets(scaled) == 2
    wait_for(lambda: num_raylets(scaled) == 1, "the end of the worker")
    assert not scaled.shards()
    shutil.rmtree(node_dir)  # another machine with the same disk

    with busy(scaled):
        wait_for(lambda: is_serving(scaled), "the next worker's shard")
        (shard,) = scaled.shards()
        assert shard["nvme"]["blocks"] == len(keys)
        assert Path(shard["directory"]) == node_dir
