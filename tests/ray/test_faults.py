"""Parts of a running tier are killed or frozen; engines go on, and what is left can be ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from kvray.actors.lookup.partitions import partition_of
from kvray.actors.names import LOOKUP_NAME, SHARD_PREFIX, SUPERVISOR_NAME, lookup_name
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.calls import call, get_actor, list_actors
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.actors.tier.rollout import Rollout
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.index import Run
from tests.ray.conftest import TIMEOUT_S, Engine, actor_process, config_with
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

StartEngine = Callable[[KVRayConfig], Engine]
KEYS = chain(5)


@pytest.fixture
def one(running: KVRayConfig, engine: StartEngine) -> Engine:
    """An engine that has stored 5 blocks, of which the lookup knows."""
    made = engine(running)
    made.say("link.register(registration)")
    made.say("store(link.arena, chain(5)) and None")
    with Client(running) as client:
        wait_for(lambda: client.match(KEYS).num_blocks == 5)
    return made


def shard_status() -> dict[str, object]:
    (status,) = tier.status(timeout_s=TIMEOUT_S)["shards"]
    return dict(status)


def serves_as(epoch: int) -> bool:
    status = shard_status()
    arena = status.get("arena")
    return isinstance(arena, dict) and arena["shard_epoch"] == epoch


def matched(config: KVRayConfig) -> int:
    try:
        with Client(config) as client:
            return client.match(KEYS).num_blocks
    except ShardUnavailable:
        return -1


def test_a_killed_shard_adopts_its_arena_and_engines_go_on(
    running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    actor_process(local, "Shard").kill()
    one.say("store(link.arena, chain(3, seed='meanwhile')) and None")
    wait_for(lambda: serves_as(epoch=2), "the restart")
    assert one.say("fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])") == "True"
    with Client(running) as client:
        wait_for(lambda: client.match(chain(3, seed="meanwhile")).num_blocks == 3)
        assert client.match(KEYS).num_blocks == 5
    wait_for(lambda: shard_status()["replicas"], "registering again")


def test_a_killed_lookup_is_rebuilt_by_the_shards(
    running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    before = tier.status(timeout_s=TIMEOUT_S)["lookup"]["epoch"]
    actor_process(local, "Lookup").kill()
    wait_for(lambda: matched(running) == 5, "rebuilding")
    assert tier.status(timeout_s=TIMEOUT_S)["lookup"]["epoch"] != before
    (shard,) = [name for name in list_actors() if name.startswith(SHARD_PREFIX)]
    lookup = get_actor(LOOKUP_NAME)
    runs = call(lookup.locate, b"".join(KEYS), timeout_s=TIMEOUT_S)
    assert runs == [Run(stop=5, holders={shard: 1})]
    assert call(lookup.replica, "one", timeout_s=TIMEOUT_S) == {0: shard}


def test_without_a_lookup_engines_find_what_their_own_node_has(
    running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    lookup = actor_process(local, "Lookup")
    lookup.suspend()
    try:
        with pytest.raises(ShardUnavailable):
            call(get_actor(LOOKUP_NAME).locate, b"".join(KEYS), timeout_s=0.2)
        assert one.say("fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])") == "True"
    finally:
        lookup.resume()


def test_a_killed_supervisor_finds_its_shards_again(
    running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    before = shard_status()
    actor_process(local, "Supervisor").kill()
    wait_for(lambda: _shards_or_none() == 1, "the restart")
    assert shard_status()["pid"] == before["pid"]
    assert len([name for name in list_actors() if name.startswith(SHARD_PREFIX)]) == 1
    assert tier.down(timeout_s=TIMEOUT_S)
    assert not running.node_dir.exists()


def _shards_or_none() -> int:
    try:
        return len(tier.status(timeout_s=TIMEOUT_S)["shards"])
    except ShardUnavailable:
        return -1


def test_a_lookup_that_was_ended_for_good_is_recreated(running: KVRayConfig, one: Engine) -> None:
    ray.kill(get_actor(LOOKUP_NAME))
    wait_for(lambda: matched(running) == 5, "a new lookup")


def test_a_shard_that_was_ended_for_good_is_recreated(running: KVRayConfig, one: Engine) -> None:
    (name,) = [name for name in list_actors() if name.startswith(SHARD_PREFIX)]
    ray.kill(get_actor(name))
    wait_for(lambda: serves_as(epoch=2), "a new shard")
    wait_for(lambda: matched(running) == 5, "its announcement")


def test_down_removes_everything_when_every_part_is_dead(
    running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    ray.kill(get_actor(SUPERVISOR_NAME))
    for name in list_actors():
        ray.kill(get_actor(name))
    wait_for(lambda: list_actors() == [])
    assert running.node_dir.exists()
    tier.down(timeout_s=TIMEOUT_S, config=running)
    assert not running.node_dir.exists()
    assert one.say("link.arena") == "None"


def test_down_ends_parts_that_hang(running: KVRayConfig, local: LocalRay, one: Engine) -> None:
    frozen = [actor_process(local, kind) for kind in ("Supervisor", "Shard", "Lookup")]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert tier.down(timeout_s=1.0, config=running)
        took = time.monotonic() - began
        assert took < 15
        sweep(running.node_dir, 10.0)
        assert not running.node_dir.exists()
        assert list_actors() == []
    finally:
        for process in frozen:
            if process.is_running():
                process.kill()


def test_status_tells_which_shard_hangs(running: KVRayConfig, local: LocalRay) -> None:
    process = actor_process(local, "Shard")
    process.send_signal(signal.SIGSTOP)
    try:
        (shard,) = tier.status(timeout_s=1.0)["shards"]
    finally:
        process.send_signal(signal.SIGCONT)
    assert shard["state"] == "unreachable"
    assert shard["shard"].startswith(SHARD_PREFIX)


@pytest.mark.parametrize("kind", ["Lookup", "Shard"])
def test_a_frozen_part_is_ended_and_restarted(
    kind: str, running: KVRayConfig, local: LocalRay, one: Engine
) -> None:
    frozen = actor_process(local, kind)
    time.sleep(3.0)  # in which the supervisor hears from each part, mostly
    frozen.send_signal(signal.SIGSTOP)
    # One that froze before it answered the supervisor for the first time is given long to start.
    end = f"the end of a frozen {kind}"
    wait_for(lambda: not frozen.is_running(), end)
    wait_for(lambda: matched(running) == 5, "another in its place")


@pytest.fixture
def second_node(local: LocalRay) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a second node of the session's Ray, with a resource; ends it after the test."""
    nodes: list[subprocess.Popen[bytes]] = []

    def start(resource: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--address={local.address}", f'--resources={{"{resource}": 1}}']
        command += ["--num-cpus=1", f"--object-store-memory={80 * 2**20}"]
        nodes.append(
            subprocess.Popen(
                command,
                env={**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        return nodes[-1]

    yield start
    for node in nodes:
        end_node(node)


def end_node(node: "subprocess.Popen[bytes]") -> None:
    if node.poll() is None:
        family = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        node.wait(20)
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            process.kill()


def test_a_node_with_the_resource_gets_a_shard_and_loses_it_when_it_leaves(
    config: KVRayConfig,
    local: LocalRay,
    second_node: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    picky = config_with(shard__resource="kvray_test")
    node = second_node("kvray_test")
    (shard,) = tier.up(picky, timeout_s=TIMEOUT_S)
    (with_resource,) = [n["NodeID"] for n in ray.nodes() if n["Resources"].get("kvray_test")]
    assert shard["node_id"] == with_resource
    end_node(node)
    wait_for(lambda: tier.status(timeout_s=TIMEOUT_S)["shards"] == [], "forgetting the shard")
    wait_for(lambda: tier.status(timeout_s=TIMEOUT_S)["lookup"]["shards"] == {})
    assert tier.down(timeout_s=TIMEOUT_S)
    assert not picky.node_dir.exists()


def seed_of(partition: int) -> str:
    """Return the seed of a chain that `partition` of two has."""
    seeds = (f"{partition} {number}" for number in range(100))
    return next(seed for seed in seeds if partition_of(chain(1, seed=seed)[0], 2) == partition)


SEEDS = [seed_of(0), seed_of(1)]
CHAINS = [chain(5, seed=seed) for seed in SEEDS]


@pytest.fixture
def two(local: LocalRay) -> Iterator[KVRayConfig]:
    made = config_with(lookup__partitions=2)
    tier.up(made, timeout_s=TIMEOUT_S)
    yield made
    tier.down(timeout_s=TIMEOUT_S, config=made)
    assert list_actors() == []


def partitions() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tier.status(timeout_s=TIMEOUT_S)["lookup"]["partitions"]
    return found


def lookup_partitions_matched(client: Client, keys: list[BlockKey]) -> int:
    try:
        return client.match(keys).num_blocks
    except ShardUnavailable:
        return -1


def located(partition: int, keys: list[BlockKey]) -> int:
    """Return the blocks of `keys` that a partition knows."""
    runs = call(get_actor(lookup_name(partition)).locate, b"".join(keys), timeout_s=TIMEOUT_S)
    return runs[-1].stop if runs else 0


def test_a_partition_that_is_killed_is_rebuilt_alone_while_the_other_answers(
    two: KVRayConfig, engine: Callable[[KVRayConfig], Engine]
) -> None:
    made = engine(two)
    for seed in SEEDS:
        made.say(f"store(link.arena, chain(5, seed={seed!r})) and None")
    with Client(two) as client:
        wait_for(
            lambda: [lookup_partitions_matched(client, keys) for keys in CHAINS] == [5, 5],
            "the announcements",
        )
        assert [[located(at, keys) for keys in CHAINS] for at in range(2)] == [[5, 0], [0, 5]]
        before = partitions()
        assert client.status()["lookup"]["keys"] == 10
        os.kill(before[1]["pid"], signal.SIGKILL)
        answers = []

        def is_rebuilt() -> bool:
            answers.append(lookup_partitions_matched(client, CHAINS[0]))
            return lookup_partitions_matched(client, CHAINS[1]) == 5 and located(1, CHAINS[1]) == 5

        wait_for(is_rebuilt, "the partition")
        assert set(answers) == {5}, "the other one answered all the time"
        after = partitions()
        assert [one["lookup"] for one in after] == [LOOKUP_NAME, f"{LOOKUP_NAME}-1"]
        assert after[0]["epoch"] == before[0]["epoch"]
        assert after[0]["resyncs"] == before[0]["resyncs"]
        assert after[1]["epoch"] != before[1]["epoch"]


def test_another_number_of_partitions_needs_no_block(
    two: KVRayConfig, engine: Callable[[KVRayConfig], Engine]
) -> None:
    made = engine(two)
    for seed in SEEDS:
        made.say(f"store(link.arena, chain(5, seed={seed!r})) and None")
    one = config_with(lookup__partitions=1)
    tier.up(one, timeout_s=TIMEOUT_S, rollout=Rollout())
    wait_for(lambda: list_actors(LOOKUP_NAME) == [LOOKUP_NAME], "the end of the second partition")
    with Client(one) as client:
        wait_for(
            lambda: [lookup_partitions_matched(client, keys) for keys in CHAINS] == [5, 5],
            "all in one",
        )
    assert "partitions" not in tier.status(timeout_s=TIMEOUT_S)["lookup"]
