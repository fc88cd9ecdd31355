"""Parts of a tier are killed, frozen or replaced: engines go on, blocks stay, and all ends."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from kvray.actors.lookup.delta import partition_of
from kvray.actors.names import LOOKUP_NAME, SHARD_PREFIX, SUPERVISOR_NAME, lookup_name
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.calls import (
    ActorCalls,
    call,
    current_namespace,
    get_actor,
    kill_actor,
    list_actors,
    tier_named,
)
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.actors.tier.rollout import Observer, Rollout
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.index import Run
from tests.kit.ray.engine import Engine
from tests.ray.conftest import TIMEOUT_S, actor_process, config_with, frozen, shard_status
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.anyio]

KEYS = chain(5)
FETCHED = "fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])"
"""An engine reads every block and compares its bytes."""


@pytest.fixture
def one(running: KVRayConfig, engine: Callable[[KVRayConfig], Engine]) -> Engine:
    """An engine that has stored 5 blocks, of which the lookup knows."""
    made = engine(running)
    assert made.say("link.register(registration)") == "None"
    made.say("store(link.arena, chain(5)) and None")
    wait_until_known()
    return made


class Life:
    """An engine that stays attached to a tier, and what the tier was when it had its blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shard = shard_status()

    def check_kept(self, shard: dict[str, Any], *, restarts: int = 1) -> None:
        """Check that the blocks are those from before, in the same arena, and the engine lives."""
        before, now = self.shard["arena"], shard["arena"]
        assert now["arena_id"] == before["arena_id"]
        assert now["shard_epoch"] == before["shard_epoch"] + restarts
        assert (shard["pid"] == self.shard["pid"]) == (restarts == 0)
        assert self.engine.say(FETCHED) == "True"
        wait_until_known()
        wait_for(lambda: _replicas() == ["one"], "the engine's registering again")


@pytest.fixture
def life(one: Engine) -> Life:
    return Life(one)


def _replicas() -> list[str]:
    return [one["replica"] for one in shard_status()["replicas"] if one["connected"]]


def epoch() -> int:
    """Return how many shards the arena has had; 0 while none serves."""
    arena = shard_status().get("arena")
    return int(arena["shard_epoch"]) if isinstance(arena, dict) else 0


def matched(client: Client, keys: list[BlockKey] = KEYS) -> int:
    """Return how many blocks are known; -1 while nobody answers."""
    try:
        return client.match(keys).num_blocks
    except ShardUnavailable:
        return -1


def wait_until_known() -> None:
    with Client(config_with()) as client:
        wait_for(lambda: matched(client) == 5, "what is known")


def test_a_killed_shard_adopts_its_arena_and_engines_go_on(running, local, life):
    actor_process(local, "Shard").kill()
    life.engine.say("store(link.arena, chain(3, seed='meanwhile')) and None")
    wait_for(lambda: epoch() == life.shard["arena"]["shard_epoch"] + 1, "the restart")
    life.check_kept(shard_status())
    with Client(running) as client:
        wait_for(lambda: client.match(chain(3, seed="meanwhile")).num_blocks == 3)


def test_a_killed_lookup_asks_the_shards_for_everything(running, local, one):
    before = tier.status(timeout_s=TIMEOUT_S)["lookup"]["pid"]
    actor_process(local, "Lookup").kill()
    wait_until_known()
    assert tier.status(timeout_s=TIMEOUT_S)["lookup"]["pid"] != before
    (shard,) = [name for name in list_actors() if name.startswith(SHARD_PREFIX)]
    lookup = get_actor(LOOKUP_NAME)
    runs = call(lookup.locate, b"".join(KEYS), timeout_s=TIMEOUT_S)
    assert runs == [Run(stop=5, holders={shard: 1})]
    assert call(lookup.replica, "one", timeout_s=TIMEOUT_S) == {0: shard}


def test_a_lookup_that_restarts_beside_a_frozen_supervisor_hears_of_the_shards(running, local, one):
    killed = actor_process(local, "Lookup")
    with frozen(actor_process(local, "Supervisor")):
        killed.kill()
        wait_for(lambda: located(0, KEYS) == 5, "a shard that names itself")


def is_supervised() -> bool:
    with contextlib.suppress(ShardUnavailable):
        return len(tier.status(timeout_s=TIMEOUT_S)["shards"]) == 1
    return False


def test_a_killed_supervisor_finds_its_shards_again(running, local, one):
    before = shard_status()
    actor_process(local, "Supervisor").kill()
    wait_for(is_supervised, "the restart")
    assert shard_status()["pid"] == before["pid"]
    assert len([name for name in list_actors() if name.startswith(SHARD_PREFIX)]) == 1


@pytest.mark.parametrize("prefix", [LOOKUP_NAME, SHARD_PREFIX])
def test_a_part_that_was_ended_for_good_is_recreated(running, one, prefix):
    before = epoch()
    (name,) = [name for name in list_actors() if name.startswith(prefix)]
    ray.kill(get_actor(name))
    if prefix == SHARD_PREFIX:
        wait_for(lambda: epoch() == before + 1, "a new shard")
    wait_until_known()


def test_down_removes_everything_when_every_part_is_dead(running, local, one):
    kill_actor(SUPERVISOR_NAME)
    for name in list_actors():  # its name may still be there
        kill_actor(name)
    wait_for(lambda: list_actors() == [])
    assert running.node_dir.exists()
    tier.down(timeout_s=TIMEOUT_S, config=running)
    assert not running.node_dir.exists()
    assert one.say("link.arena") == "None"


def test_down_ends_parts_that_hang(running, local, one):
    with frozen(*(actor_process(local, kind) for kind in ("Supervisor", "Shard", "Lookup"))):
        began = time.monotonic()
        assert tier.down(timeout_s=1.0, config=running)
        assert time.monotonic() - began < 15
        sweep(running.node_dir, 10.0)
        assert not running.node_dir.exists()
        assert list_actors() == []


@pytest.mark.parametrize("kind", ["Lookup", "Shard"])
def test_a_frozen_part_is_shown_ended_and_restarted(kind, running, local, one):
    process = actor_process(local, kind)
    time.sleep(3.0)  # in which the supervisor hears from each part, mostly
    process.suspend()
    status = tier.status(timeout_s=1.0)
    part = status["lookup"] if kind == "Lookup" else status["shards"][0]
    assert part["state"] == "unreachable"
    # One that froze before it answered the supervisor for the first time is given long to start.
    wait_for(lambda: not process.is_running(), f"the end of a frozen {kind}")
    wait_until_known()


def seed_of(partition: int) -> str:
    """Return the seed of a chain that `partition` of two has."""
    seeds = (f"{partition} {number}" for number in range(100))
    return next(seed for seed in seeds if partition_of(chain(1, seed=seed)[0], 2) == partition)


SEEDS = [seed_of(0), seed_of(1)]
CHAINS = [chain(5, seed=seed) for seed in SEEDS]


def partitions() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tier.status(timeout_s=TIMEOUT_S)["lookup"]["partitions"]
    return found


def located(partition: int, keys: list[BlockKey]) -> int:
    """Return the blocks of `keys` that a partition knows; -1 while it does not answer."""
    try:
        runs = call(get_actor(lookup_name(partition)).locate, b"".join(keys), timeout_s=TIMEOUT_S)
    except ShardUnavailable:
        return -1
    return runs[-1].stop if runs else 0


def test_another_number_of_partitions_needs_no_block_and_one_that_is_killed_is_rebuilt_alone(
    running, engine
):
    two = config_with(lookup__partitions=2)
    made = engine(running)
    for seed in SEEDS:
        made.say(f"store(link.arena, chain(5, seed={seed!r})) and None")
    tier.up(two, timeout_s=TIMEOUT_S)
    with Client(two) as client:
        wait_for(lambda: [matched(client, keys) for keys in CHAINS] == [5, 5], "announcing")
        own = [[5, 0], [0, 5]]
        wait_for(lambda: [[located(at, keys) for keys in CHAINS] for at in range(2)] == own)
        before = partitions()
        assert client.status()["lookup"]["keys"] == 10
        os.kill(before[1]["pid"], signal.SIGKILL)
        answers = []

        def is_rebuilt() -> bool:
            answers.append(matched(client, CHAINS[0]))
            return matched(client, CHAINS[1]) == 5 and located(1, CHAINS[1]) == 5

        wait_for(is_rebuilt, "the partition")
        assert set(answers) == {5}, "the other one answered all the time"
        after = partitions()
        assert [one["lookup"] for one in after] == [LOOKUP_NAME, f"{LOOKUP_NAME}-1"]
        assert after[0]["pid"] == before[0]["pid"]
        assert after[0]["resyncs"] == before[0]["resyncs"]
        assert after[1]["pid"] != before[1]["pid"]
    tier.up(running, timeout_s=TIMEOUT_S)
    wait_for(lambda: list_actors(LOOKUP_NAME) == [LOOKUP_NAME], "the end of the second partition")
    with Client(running) as client:
        wait_for(lambda: [matched(client, keys) for keys in CHAINS] == [5, 5], "all in one")
    assert "partitions" not in tier.status(timeout_s=TIMEOUT_S)["lookup"]


NAME = "kvray-test-async"


class Other:
    """An actor that is slow, or raises, if asked to."""

    def echo(self, value: Any, after_s: float = 0.0) -> Any:
        time.sleep(after_s)
        return value

    def refuse(self) -> None:
        raise ConfigError("No.")

    def fail(self) -> None:
        raise IndexError("a defect")


def create() -> Any:
    made = ray.remote(Other).options(name=NAME, namespace=current_namespace(), num_cpus=0).remote()
    ray.get(made.echo.remote(0), timeout=TIMEOUT_S)
    return made


def end(actor: Any) -> None:
    """Kill an actor, and wait until its name is free."""
    ray.kill(actor)
    wait_for(lambda: NAME not in list_actors(), "its end")


@pytest.fixture
def other(local: LocalRay) -> Iterator[Any]:
    made = create()
    yield made
    end(made)


async def test_answers_and_errors_come_back_from_the_tier_that_the_caller_means(other):
    call = ActorCalls()
    with tier_named("another"), pytest.raises(ShardUnavailable, match="tier 'another' has no"):
        await call(NAME, "echo", 5, timeout_s=TIMEOUT_S)
    assert await call(NAME, "echo", 5, timeout_s=TIMEOUT_S) == 5
    with pytest.raises(ConfigError, match="No"):
        await call(NAME, "refuse", timeout_s=TIMEOUT_S)
    with pytest.raises(ShardUnavailable, match="a defect"):
        await call(NAME, "fail", timeout_s=TIMEOUT_S)


async def test_what_is_late_is_not_waited_for_and_harms_no_later_call(other):
    call = ActorCalls()
    began = time.monotonic()
    with pytest.raises(ShardUnavailable, match="did not answer within"):
        await call(NAME, "echo", 1, 3.0, timeout_s=0.3)
    assert time.monotonic() - began < 3
    assert await call(NAME, "echo", 2, timeout_s=TIMEOUT_S) == 2


async def test_one_that_was_recreated_is_found_under_its_name(local):
    call = ActorCalls()
    with pytest.raises(ShardUnavailable, match="kvray up"):
        await call(NAME, "echo", 1, timeout_s=TIMEOUT_S)
    first = create()
    assert await call(NAME, "echo", 1, timeout_s=TIMEOUT_S) == 1
    end(first)
    with pytest.raises(ShardUnavailable):
        await call(NAME, "echo", 1, timeout_s=TIMEOUT_S)
    second = create()
    assert await call(NAME, "echo", 2, timeout_s=TIMEOUT_S) == 2
    end(second)


async def test_while_ray_tells_of_no_actor_few_threads_ask(local, monkeypatch):
    asked: list[str] = []

    def hang(name: str) -> None:
        asked.append(name)
        time.sleep(0.5)
        raise ShardUnavailable("Ray's head is back.")

    monkeypatch.setattr("kvray.actors.ray_glue.calls.get_actor", hang)

    call = ActorCalls()
    tries = [call(f"actor {number}", "echo", timeout_s=0.1) for number in range(10)]
    errors = [str(one) for one in await asyncio.gather(*tries, return_exceptions=True)]
    assert sum("did not answer" in error for error in errors) == 10
    assert len(asked) == 4


def rolled_out(config: KVRayConfig, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Bring the tier to a configuration; return its shards, and what is said to be done."""
    done: list[str] = []
    observer = Observer(told=done.append)
    return tier.up(config, timeout_s=TIMEOUT_S, observer=observer, **options), done


def test_other_settings_of_a_shard_come_with_a_new_one_that_keeps_the_arena(local, running, life):
    other = config_with(arena__free_target=0.2, shard__silent_s=2.5)
    (shard,), done = rolled_out(other)
    life.check_kept(shard)
    assert [sentence.partition(" was restarted: ")[0] for sentence in done] == [
        "The supervisor",
        "The lookup",
        shard["shard"],
    ]
    assert "arena.free_target is 0.2 now and was 0.05" in done[2]
    assert "5 blocks in memory as before" in done[2]
    for kind in ("Supervisor", "Shard"):
        process = actor_process(local, kind)
        process.kill()
        process.wait(TIMEOUT_S)
    for name in (SUPERVISOR_NAME, shard["shard"]):
        wait_for(lambda name=name: _free_target(name) == 0.2, name)
    assert rolled_out(other)[1] == [], "what Ray has started again has these settings too"
    (shard,), done = rolled_out(other, rollout=Rollout(restart=True))
    life.check_kept(shard, restarts=3)
    assert len(done) == 3, "everything, if that is asked for"
    assert LOOKUP_NAME in list_actors()


def _free_target(name: str) -> object:
    try:
        build = call(get_actor(name).build_info, timeout_s=1.0)
    except ShardUnavailable:
        return None  # Ray is about to start it
    return build["settings"]["arena.free_target"]


def test_a_rollout_that_was_interrupted_is_finished_by_the_next_up(running, life):
    other = config_with(arena__free_target=0.2)

    class Interrupt(Exception):
        pass

    def interrupt(sentence: str) -> None:
        if sentence.startswith("The supervisor"):
            raise Interrupt

    with pytest.raises(Interrupt):
        tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=interrupt))
    kill_actor(SUPERVISOR_NAME)  # as if it had come a moment earlier
    (shard,), done = rolled_out(other)
    life.check_kept(shard)
    assert len(done) == 1


def test_a_new_arena_is_made_only_when_it_is_meant_and_engines_follow(running, life):
    larger = config_with(arena__capacity="32MiB")
    with pytest.raises(ConfigError, match=r"arena\.capacity is 32MiB now and was 16MiB.*recreate"):
        tier.up(larger, timeout_s=TIMEOUT_S)
    life.check_kept(shard_status(), restarts=0)
    (shard,) = tier.up(larger, timeout_s=TIMEOUT_S, rollout=Rollout(recreate=True))
    assert shard["arena"]["capacity_bytes"] == 32 * 2**20
    assert shard["arena"]["blocks"] == 0
    new = repr(shard["arena"]["arena_id"])
    wait_for(lambda: life.engine.say("link.arena.arena_id") == new, "attaching")


def test_a_shard_that_failed_over_its_settings_is_mended_by_an_up_with_better_ones(running, life):
    with pytest.raises(KVRayError, match="NVMe tier"):
        tier.up(config_with(nvme__dir="/proc/nowhere"), timeout_s=TIMEOUT_S)
    (shard,) = tier.up(running, timeout_s=TIMEOUT_S)
    assert shard["state"] == "serving"
    assert life.engine.say(FETCHED) == "True"


def test_shards_of_nodes_that_are_not_meant_any_more_end_and_up_says_that_no_node_is(running):
    lacking = config_with(shard__resource="kvray_shard", shard__label="tier=kv")
    shards, done = rolled_out(lacking, wait=False)
    assert shards == []
    assert any("no longer among those that get a shard" in sentence for sentence in done)
    assert not running.node_dir.exists()
    assert not any(name.startswith("kvray-shard-") for name in list_actors())
    sentence = "has the resource 'kvray_shard' and label 'tier=kv'; start nodes"
    with pytest.raises(ConfigError, match=sentence):
        tier.up(lacking, timeout_s=5.0)
