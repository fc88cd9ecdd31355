"""A lookup of two partitions on Ray: one is killed and rebuilt alone, the other goes on."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvray.actors.lookup.partitions import partition_of
from kvray.actors.names import LOOKUP_NAME, lookup_name
from kvray.actors.ray_glue.calls import call, get_actor, list_actors
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.actors.tier.rollout import Rollout
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from tests.ray.conftest import TIMEOUT_S, Engine, config_with
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray


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


def matched(client: Client, keys: list[BlockKey]) -> int:
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
        wait_for(lambda: [matched(client, keys) for keys in CHAINS] == [5, 5], "the announcements")
        assert [[located(at, keys) for keys in CHAINS] for at in range(2)] == [[5, 0], [0, 5]]
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
        wait_for(lambda: [matched(client, keys) for keys in CHAINS] == [5, 5], "all in one")
    assert "partitions" not in tier.status(timeout_s=TIMEOUT_S)["lookup"]
