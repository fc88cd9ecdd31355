"""Nodes that go, as Ray says or unused: their blocks are on others then."""

import contextlib
import json
import random
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvray.errors import KVRayError
from kvray.lab.chaos.machine import PAIR, Machine
from kvray.reference.replica import Replica
from kvray.store.arena import slabs
from tests.kit.ray.cluster import (
    PATIENT,
    SETTINGS,
    TOKENS_PER_BLOCK,
    TwoNodes,
    open_tier,
    prompt_of,
)
from tests.kit.ray.command_line import free_port
from tests.unit.store.small_arena import chain, store
from tests.waiting import HANG_S, wait_for

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
        "worker": {"resources": {"CPU": 1, PAIR: 1, "object_store_memory": 80 * 2**20}},
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
    return sum(one.name() == "raylet" for one in scaled.machine.head.ray.family())


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


# -- under load, arenas full: what a drain saves of the next minute's hits -------------------------

NUM_USED = 81
"""Prompts that are asked for again and again; they fit in the memory of two nodes."""
USED = [prompt_of(f"used {at}", 620) for at in range(NUM_USED)]
USED_BLOCKS = 620 // TOKENS_PER_BLOCK
LOAD_S, DEADLINE_S, MINUTE_S = 20.0, 30, 60.0
FULL = {
    **PATIENT,
    "arena": {**SETTINGS["arena"], "capacity": "16MiB", "slab": "1MiB", "slot_min": "16KiB"},
}


@dataclass(slots=True)
class Run:
    """A tier of three nodes, an engine on each, and what became of the requests.

    Each node has a third of the prompts, beside so many others' blocks that its arena is full. All
    runs ask for the same prompts in the same order.
    """

    tier: TwoNodes
    replicas: list[Replica]
    failed: list[str] = field(default_factory=list)
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)

    def ask(self, at: int, number: int) -> int:
        """Ask an engine for a prompt; return its hit tokens."""
        try:
            output = self.replicas[number].generate(USED[at], max_tokens=2, timeout_s=60.0)
        except KVRayError as error:
            self.failed.append(str(error))
            return 0
        self.answers.setdefault(at, set()).add(tuple(output.token_ids))
        return int(output.hit_tokens)

    def fill(self) -> None:
        for number, node in enumerate(self.tier.nodes):
            self.ask(number, number)
            with self.tier.arena_of(node) as arena:
                (size,) = slabs.block_sizes(arena.tables)
                geometry = arena.tables.geometry
                for at in range(geometry.capacity // geometry.stride(size) // USED_BLOCKS):
                    store(arena, chain(USED_BLOCKS, seed=f"{number} {at}"), block_bytes=size)
        self.each(range(NUM_USED))
        self.each(range(NUM_USED))

    def each(self, prompts: Iterable[int]) -> None:
        """Ask each node for its own of the prompts; the three at once."""

        def one(number: int) -> None:
            for at in prompts:
                if at % 3 == number:
                    self.ask(at, number)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(one, range(3)))

    def load(self, seconds: float) -> None:
        """Ask each node for some of its own prompts, again and again."""
        until, order = time.monotonic() + seconds, random.Random("load")
        while time.monotonic() < until:
            self.each(order.sample(range(NUM_USED), 9))

    def drain(self, *, deadline_s: int) -> None:
        """Tell Ray that the third node goes, as a cloud's notice does."""
        machine, directory = self.tier.machine, str(self.tier.node_dir(self.tier.nodes[2]))
        (node_id,) = (x["node_id"] for x in self.tier.shards() if x["directory"] == directory)
        done = machine.begin(
            "ray.scripts.scripts",
            "drain-node",
            f"--address={machine.address}",
            f"--node-id={node_id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot",
            f"--deadline-remaining-seconds={deadline_s}",
        )
        assert done.wait(HANG_S) == 0

    def lose(self) -> None:
        self.replicas[2].kill()
        self.tier.nodes[2].kill()

    def ask_those_that_stay(self) -> int:
        """Ask two nodes for each prompt within a minute; return their hit tokens."""
        began, rng, hits = time.monotonic(), random.Random("order"), 0
        for nth, at in enumerate(rng.sample(range(NUM_USED), NUM_USED)):
            time.sleep(max(0.0, began + nth * MINUTE_S / NUM_USED - time.monotonic()))
            hits += self.ask(at, nth % 2)
        assert not self.failed
        assert all(len(answers) == 1 for answers in self.answers.values()), "no other text"
        return hits


def hits_that_stay(*, is_drained: bool) -> int:
    """Return what two nodes hit when the third has been drained and lost, or stays."""
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(Machine(num_nodes=3))
        tier = stack.enter_context(open_tier(machine, "loaded", FULL, num_nodes=3))
        replicas = [tier.spawn(number, num_blocks=48) for number in range(3)]
        stack.callback(lambda: [one.kill() for one in replicas])
        for replica in replicas:
            replica.wait_ready()
        run = Run(tier, replicas)
        run.fill()
        run.load(LOAD_S)
        if is_drained:
            run.drain(deadline_s=DEADLINE_S)
        run.load(DEADLINE_S)
        if is_drained:
            run.lose()
        return run.ask_those_that_stay()


def test_of_the_hits_of_a_node_that_goes_a_drain_saves_nearly_all():
    kept, drained = (hits_that_stay(is_drained=is_drained) for is_drained in (False, True))
    print(kept, drained)
    assert drained >= 0.95 * kept > 0, "a third of the prompts was on no other node"
