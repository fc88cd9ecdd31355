"""What holds on one node: the tier's settings, then its labels, then its own environment."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from kvray.config import KVRayConfig, config_on_node, load_config, values_on_nodes
from kvray.errors import ConfigError

MIB = 2**20
GIB = 2**30
BIG = {"kvray.io/pool": "big"}


def tier(*nodes: dict[str, Any], **dotted: Any) -> KVRayConfig:
    overrides = {name.replace("__", "."): value for name, value in dotted.items()}
    return load_config(overrides={"nodes": list(nodes), **overrides}, environ={})


def entry(label: str = "kvray.io/pool=big", /, **sections: Any) -> dict[str, Any]:
    return {"label": label, **sections}


def test_a_label_changes_what_its_entry_names_and_nothing_else():
    config = tier(entry(arena={"capacity": "8GiB"}, nvme={"dir": "/mnt/a"}), arena__policy="lru")
    there = config_on_node(config, {}, labels=BIG)
    assert (there.arena.capacity, there.arena.policy) == (8 * GIB, "lru")
    assert there.nvme_dir == Path("/mnt/a/kvray-kvray")
    assert there.shard == config.shard


@pytest.mark.parametrize("labels", [{}, {"kvray.io/pool": "small"}, {"pool": "big"}, None])
def test_other_nodes_are_as_the_tier(labels):
    config = tier(entry(arena={"capacity": "8GiB"}))
    assert config_on_node(config, {}, labels=labels).arena == config.arena


def test_a_later_entry_wins_setting_by_setting():
    config = tier(
        entry(arena={"capacity": "8GiB", "free_target": 0.2}),
        entry("disk=slow", arena={"capacity": "16GiB"}),
    )
    arena = config_on_node(config, {}, labels={**BIG, "disk": "slow"}).arena
    assert (arena.capacity, arena.free_target) == (16 * GIB, 0.2)


def test_the_node_s_own_environment_wins_over_its_labels():
    config = tier(entry(arena={"capacity": "8GiB", "free_target": 0.2}))
    arena = config_on_node(config, {"KVRAY_ARENA__CAPACITY": "2GiB"}, labels=BIG).arena
    assert (arena.capacity, arena.free_target) == (2 * GIB, 0.2)


def test_a_label_can_take_a_setting_back():
    config = tier(entry(nvme={"dir": None}), nvme__dir="/mnt/a")
    assert config_on_node(config, {}, labels=BIG).nvme.dir is None


def test_quotas_of_a_label_stand_in_place_of_the_tier_s():
    config = tier(entry(arena={"quotas": {"12": "1MiB"}}), arena__quotas={"34": "1MiB"})
    environ = {"KVRAY_ARENA__QUOTAS__56": "2MiB"}
    assert config_on_node(config, environ, labels=BIG).arena.quotas == {"12": MIB, "56": 2 * MIB}
    assert config_on_node(config, {}, labels=BIG).arena.quotas == {"12": MIB}, "a copy each time"


def test_a_small_node_may_leave_the_slab_to_kvray():
    small = config_on_node(tier(), {"KVRAY_ARENA__CAPACITY": "16MiB"})
    assert small.arena.capacity == 16 * MIB


def test_a_quota_that_bounds_on_the_largest_nodes_only_is_fine():
    config = tier(entry(arena={"capacity": "64GiB"}), arena__namespace_quota="48GiB")
    assert config.arena.namespace_quota == 48 * GIB
    assert config_on_node(config, {"KVRAY_ARENA__CAPACITY": "1GiB"}).arena.capacity == GIB


def test_an_engine_on_a_small_node_may_read_quotas_of_the_tier():
    environ = {"KVRAY_ARENA__CAPACITY": "1GiB"}
    overrides = {"arena.namespace_quota": "2GiB"}
    assert load_config(overrides=overrides, environ=environ).arena.capacity == GIB
    with pytest.raises(ConfigError, match="would bound nothing"):
        load_config(overrides={**overrides, "arena.capacity": "1GiB"}, environ={})


def test_what_contradicts_itself_on_a_node_is_said_of_it():
    config = tier(arena__slab="64MiB")
    with pytest.raises(ConfigError, match=r"^On this node: .*arena\.slab .* is larger than"):
        config_on_node(config, {"KVRAY_ARENA__CAPACITY": "16MiB"})


def test_every_value_that_a_setting_has_on_some_node_is_known():
    config = tier(entry(arena={"capacity": "8GiB"}), entry("a=b", nvme={"flush_s": 5}))
    assert values_on_nodes(config, "arena", "capacity") == [4 * GIB, 8 * GIB]
    assert values_on_nodes(config, "nvme", "flush_s") == [60.0, 5.0]


def test_entries_survive_their_way_to_another_process():
    config = tier(entry(arena={"capacity": "8GiB"}))
    there = pickle.loads(pickle.dumps(config))  # noqa: S301 - as Ray sends it
    assert there == config
    assert config_on_node(there, {}, labels=BIG).arena.capacity == 8 * GIB


def test_an_entry_that_says_the_default_differs_from_one_that_says_nothing():
    says = tier(entry(arena={"capacity": "4GiB", "slab": "1MiB"}), arena__capacity="8GiB")
    assert config_on_node(says, {}, labels=BIG).arena.capacity == 4 * GIB
    assert says != tier(entry(arena={"slab": "1MiB"}), arena__capacity="8GiB")
