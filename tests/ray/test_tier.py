"""A tier on a local Ray: up, status, down, what is refused, and what a shard knows of memory."""

import numpy as np
import pytest
import ray

from kvray.actors.names import SUPERVISOR_NAME
from kvray.actors.ray_glue.calls import call, get_actor, list_actors, mapped_errors
from kvray.actors.shard.actor import memory_claims
from kvray.actors.supervisor.supervisor import chosen_nodes
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.client import Client
from kvray.config import KVRayConfig, ShardConfig
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store.machine.capacity import MemoryClaims
from tests.ray.conftest import TIMEOUT_S, config_with
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray


def test_up_status_down_and_up_again(config: KVRayConfig) -> None:
    for _ in range(2):
        (shard,) = tier.up(config, timeout_s=TIMEOUT_S)
        assert shard["state"] == "serving"
        assert config.node_dir.is_dir()
        status = tier.status(timeout_s=TIMEOUT_S)
        assert status["cluster_name"] == config.cluster_name
        assert [one["shard"] for one in status["shards"]] == [shard["shard"]]
        assert tier.down(timeout_s=TIMEOUT_S)
        assert not config.node_dir.exists()
        assert list_actors() == []
    assert not tier.down(timeout_s=TIMEOUT_S)
    with pytest.raises(ShardUnavailable, match="start the tier with `kvray up`"):
        tier.status(timeout_s=TIMEOUT_S)


def test_an_arena_that_does_not_fit_is_refused_and_leaves_nothing(config: KVRayConfig) -> None:
    huge = config_with(arena__capacity="900TiB", arena__slab="1TiB", arena__slot_min="1GiB")
    with pytest.raises(CapacityError, match=r"lower arena\.capacity"):
        tier.up(huge, timeout_s=TIMEOUT_S)
    assert tier.down(timeout_s=TIMEOUT_S)
    assert not config.node_dir.exists()


def test_an_arena_dir_that_cannot_be_used_is_refused(config: KVRayConfig) -> None:
    with pytest.raises(ConfigError, match=r"set arena\.dir to a tmpfs"):
        tier.up(config_with(arena__dir="/proc/nowhere"), timeout_s=TIMEOUT_S)
    assert tier.down(timeout_s=TIMEOUT_S)


def test_without_a_node_that_has_the_resource_up_says_so(config: KVRayConfig) -> None:
    lacking = config_with(shard__resource="kvray_shard", shard__label="tier=kv")
    sentence = "has the resource 'kvray_shard' and label 'tier=kv'; start nodes"

    def is_refused() -> bool:
        try:
            tier.up(lacking, timeout_s=1.0)
        except ShardUnavailable:  # the supervisor takes longer to start
            return False
        except ConfigError as error:
            return sentence in str(error)
        return False

    wait_for(is_refused, "the refusal")


def test_a_client_without_a_tier_says_so(config: KVRayConfig) -> None:
    with Client(config) as client:
        for ask in (client.status, client.clear, lambda: client.match(chain(1))):
            with pytest.raises(ShardUnavailable, match="`kvray up`"):
                ask()


def test_calls_to_a_dead_actor_say_so(running: KVRayConfig) -> None:
    supervisor = get_actor(SUPERVISOR_NAME)
    with mapped_errors():
        ray.kill(supervisor)

    def answers() -> str | None:
        try:
            call(supervisor.config, timeout_s=TIMEOUT_S)
        except ShardUnavailable as error:
            return str(error)
        return None  # it has not died yet

    wait_for(lambda: "is gone" in (answers() or ""), "its end")


ALIVE = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 1.0, "kvray_shard": 1.0}}
PLAIN = {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}, "Labels": {"tier": "kv"}}
DEAD = {"NodeID": "c", "Alive": False, "Resources": {"kvray_shard": 1.0}}


@pytest.mark.parametrize(
    ("resource", "label", "chosen"),
    [
        (None, None, {"a", "b"}),
        ("kvray_shard", None, {"a"}),
        (None, "tier=kv", {"b"}),
        (None, "tier=other", set()),
        ("kvray_shard", "tier=kv", set()),
        ("nowhere", None, set()),
    ],
)
def test_living_nodes_with_the_resource_and_the_label_get_a_shard(
    resource: str | None, label: str | None, chosen: set[str]
) -> None:
    shard = ShardConfig(resource=resource, label=label)
    assert chosen_nodes([ALIVE, PLAIN, DEAD], shard) == chosen


MIB = 2**20


def claims_on_a_node() -> MemoryClaims:
    task = ray.remote(memory_claims).options(num_cpus=0)
    found: MemoryClaims = ray.get(task.remote(), timeout=TIMEOUT_S)
    return found


def test_what_is_in_the_object_store_is_no_claim_any_more(local: LocalRay) -> None:
    before = claims_on_a_node()
    assert 30 * MIB < before.object_store_bytes <= 80 * MIB
    assert before.threshold == 0.95
    held = ray.put(np.zeros(20 * MIB, dtype=np.uint8))
    expected = before.object_store_bytes - 20 * MIB
    wait_for(lambda: claims_on_a_node().object_store_bytes <= expected, "Ray's own figure")
    del held


def test_a_shard_tells_of_its_pages(running: KVRayConfig) -> None:
    (shard,) = tier.status(timeout_s=TIMEOUT_S)["shards"]
    assert shard["memory"]["mapped_bytes"] > 0
    assert shard["memory"]["numa_nodes"] >= 0
