"""A tier that is up: what it answers, and what it refuses. One for the whole module."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue.calls import call, get_actor, tier_named
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from tests.ray.conftest import TIMEOUT_S, Engine, config_with
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

StartEngine = Callable[[KVRayConfig], Engine]


@pytest.fixture(scope="module")
def running(local: LocalRay) -> Iterator[KVRayConfig]:
    config = config_with()
    tier.up(config, timeout_s=TIMEOUT_S)
    yield config
    tier.down(timeout_s=TIMEOUT_S, config=config)


def test_up_twice_changes_nothing(running: KVRayConfig) -> None:
    before = tier.status(timeout_s=TIMEOUT_S)
    (shard,) = tier.up(running, timeout_s=TIMEOUT_S)
    assert shard["pid"] == before["shards"][0]["pid"]
    assert shard["arena"]["arena_id"] == before["shards"][0]["arena"]["arena_id"]


def test_other_settings_of_a_client_are_no_matter(running: KVRayConfig) -> None:
    other = config_with(connector__replica="mine", ray__timeout_s=7)
    assert tier.up(other, timeout_s=TIMEOUT_S)


def test_a_tier_of_another_name_is_not_started_in_this_one_s_namespace(
    running: KVRayConfig,
) -> None:
    other = config_with("other")
    with pytest.raises(ConfigError, match=f"in the namespace 'kvray-{running.cluster_name}'"):
        tier.up(other, timeout_s=TIMEOUT_S)
    assert not other.node_dir.exists()


def test_a_client_means_its_tier_whatever_namespace_its_process_joined(
    running: KVRayConfig,
) -> None:
    with Client(running) as client, tier_named("elsewhere"):
        assert client.status()["cluster_name"] == running.cluster_name
        with pytest.raises(ShardUnavailable, match="'elsewhere'"):
            tier.status(timeout_s=TIMEOUT_S)


def test_an_engine_and_a_client_see_the_same_blocks(
    running: KVRayConfig, engine: StartEngine
) -> None:
    one = engine(running)
    assert one.say("link.register(registration)") == "None"
    one.say("store(link.arena, chain(5)) and None")
    keys = chain(5)
    with Client(running) as client:
        wait_for(lambda: client.match(keys).num_blocks == 5)
        assert list(client.match(keys).holders.values()) == [5]
        assert client.match(keys, num_parts=2).num_blocks == 0
        assert client.match([]).num_blocks == 0
        (shard,) = client.status()["shards"]
        assert shard["replicas"][0]["replica"] == "one"
        assert client.clear() == 5
        wait_for(lambda: client.match(keys).num_blocks == 0)
        assert client.clear() == 0
    assert ray.is_initialized(), "the client did not make this connection"
    assert one.say("'ray' in sys.modules") == "False"


@pytest.mark.parametrize("key", [b"short", 7, "text", bytearray(32)])
def test_what_is_no_key_is_refused_before_the_call(running: KVRayConfig, key: Any) -> None:
    with Client(running) as client, pytest.raises(ConfigError, match="A key is 32 bytes"):
        client.match([key])


def test_a_number_of_parts_that_no_block_has_is_refused(running: KVRayConfig) -> None:
    with Client(running) as client, pytest.raises(ConfigError, match="num_parts"):
        client.match(chain(1), num_parts=0)


def test_a_defect_in_an_actor_is_one_of_kvrays_errors(running: KVRayConfig) -> None:
    with pytest.raises(ShardUnavailable, match="failed by a defect"):
        call(get_actor(LOOKUP_NAME).match, 7, 1, timeout_s=TIMEOUT_S)


def test_an_error_of_an_actor_arrives_as_it_was_raised(running: KVRayConfig) -> None:
    with pytest.raises(ConfigError) as raised:
        call(get_actor(LOOKUP_NAME).match, 1, b"x", timeout_s=TIMEOUT_S)
    assert raised.type is ConfigError
    assert isinstance(raised.value, KVRayError)


def test_an_actor_that_does_not_answer_costs_the_deadline(local: LocalRay) -> None:
    class Slow:
        def wait(self) -> None:
            time.sleep(30)

    slow = ray.remote(Slow).options(num_cpus=0).remote()
    began = time.monotonic()
    with pytest.raises(ShardUnavailable, match="did not answer in time"):
        call(slow.wait, timeout_s=0.3)
    assert time.monotonic() - began < 5
    ray.kill(slow)
