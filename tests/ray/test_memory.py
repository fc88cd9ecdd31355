"""What a shard learns of its node's memory from Ray, and what it tells of its own."""

import numpy as np
import pytest
import ray

from kvray.actors.shard.actor import memory_claims
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from kvray.store.machine.capacity import MemoryClaims
from tests.ray.conftest import TIMEOUT_S
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

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
