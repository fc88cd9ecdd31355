"""What `nodes` says of a label holds on the nodes that have it, and on no other."""

from collections.abc import Callable

import pytest
import ray

from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from tests.ray.conftest import TIMEOUT_S, Engine, config_with
from tests.unit.store.small_arena import chain

pytestmark = pytest.mark.ray

MIB = 2**20
StartEngine = Callable[[KVRayConfig], Engine]


@pytest.fixture
def label(local: LocalRay) -> str:
    """A label that this Ray's only living node has."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    key, value = next(iter(node["Labels"].items()))
    return f"{key}={value}"


def capacity_of(config: KVRayConfig) -> int:
    (shard,) = tier.up(config, timeout_s=TIMEOUT_S)
    return int(shard["arena"]["capacity_bytes"])


def test_a_node_with_the_label_has_what_it_says_and_engines_find_it(
    config: KVRayConfig, label: str, engine: StartEngine
) -> None:
    nodes = [
        {"label": "kvray.io/pool=nobodys", "arena": {"capacity": "64MiB"}},
        {"label": label, "arena": {"capacity": "32MiB", "free_target": 0.1}},
    ]
    there = config_with(nodes=nodes)
    assert config.arena.capacity == 16 * MIB
    assert capacity_of(there) == 32 * MIB
    one = engine(config)  # knows nothing of labels
    assert one.say("link.register(registration)") == "None"
    one.say("store(link.arena, chain(2)) and None")
    assert tier.clear(timeout_s=TIMEOUT_S) == len(chain(2))
    assert tier.down(timeout_s=TIMEOUT_S, config=there)
    assert not config.node_dir.exists()


def test_a_node_without_the_label_is_as_the_others(config: KVRayConfig) -> None:
    other = {"label": "kvray.io/pool=nobodys", "arena": {"capacity": "64MiB"}}
    assert capacity_of(config_with(nodes=[other])) == 16 * MIB


def test_what_contradicts_itself_on_one_node_only_is_said_by_up(
    config: KVRayConfig, label: str
) -> None:
    nodes = [
        {"label": label, "arena": {"slab": "16MiB"}},
        {"label": label, "arena": {"capacity": "8MiB"}},
    ]
    # With two labels it would load: which of them one node has, only the node knows.
    unchecked = KVRayConfig.model_validate(
        {**config.model_dump(exclude_unset=True), "nodes": nodes}
    )
    with pytest.raises(ConfigError, match=r"^On this node: .*arena\.slab \(16MiB\) is larger"):
        tier.up(unchecked, timeout_s=TIMEOUT_S)
