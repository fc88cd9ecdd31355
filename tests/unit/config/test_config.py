import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvray import config
from kvray.config import (
    KVRayConfig,
    cache_dir,
    config_on_node,
    format_size,
    load_config,
    parse_size,
    ray_memory_threshold,
    reading,
    values_on_nodes,
)
from kvray.errors import ConfigError

GiB = 2**30
WriteYaml = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "WELL_KNOWN_PATH", tmp_path / "etc" / "kvray.yaml")


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    def write(text: str) -> Path:
        path = tmp_path / "kvray.yaml"
        path.write_text(text)
        return path

    return write


def load(path: Path | None = None, /, environ: Any = None, **options: Any) -> KVRayConfig:
    return load_config(path, environ=environ or {}, **options)


CAPACITY = "KVRAY_ARENA__CAPACITY"
FILE = "arena: {capacity: 1GiB}"
LAYERS: dict[str, tuple[str, dict[str, str], dict[str, Any], int]] = {
    "a file wins over the defaults": (FILE, {}, {}, 1),
    "the environment wins over a file": (FILE, {CAPACITY: "2GiB"}, {}, 2),
    "an override wins over both": (FILE, {CAPACITY: "2GiB"}, {"arena.capacity": "3GiB"}, 3),
    "an override of none is no value": ("", {CAPACITY: "2GiB"}, {"arena.capacity": None}, 2),
    "an empty variable is not set": (FILE, {CAPACITY: ""}, {}, 1),
    "an empty section can be set elsewhere": ("arena:\n", {}, {"arena.capacity": "1GiB"}, 1),
    "other keys of the section stay": (FILE, {"KVRAY_ARENA__SLAB": "1MiB"}, {}, 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_later_source_wins(write_yaml, name):
    text, environ, overrides, capacity = LAYERS[name]
    given = load(write_yaml(text), environ=environ, overrides=overrides)
    assert given.arena.capacity == capacity * GiB


def test_the_callers_file_is_read_else_the_environments_else_the_well_known_one(
    monkeypatch, tmp_path
):
    known, named, given = (tmp_path / name for name in ("known", "named", "given"))
    for path in (known, named, given):
        path.write_text(f"cluster_name: {path.name}")
    monkeypatch.setattr(reading, "WELL_KNOWN_PATH", known)
    environ = {"KVRAY_CONFIG": str(named)}
    assert load().cluster_name == "known"
    assert load(environ=environ).cluster_name == "named"
    assert load(given, environ=environ).cluster_name == "given"


def test_variables_name_the_cluster_and_tenants_as_they_are_written_and_give_numbers():
    given = load(
        environ={
            "KVRAY_CLUSTER_NAME": "blue",
            "KVRAY_ARENA__HOLDERS_MAX": "16",
            "KVRAY_SECURITY__TENANT_QUOTAS__Alice": "1GiB",
            "KVRAY_SECURITY__TENANT_SECRET_FILE": "/secret",
        }
    )
    assert (given.cluster_name, given.arena.holders_max) == ("blue", 16)
    assert given.security.tenant_quotas == {"Alice": GiB}


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone():
    url = "tcp://10.0.0.1:5557"
    given = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "5557", "SERVICE_PORT_HTTP": "5557"}
    given |= {"PORT": url, "PORT_5557_TCP": url, "PORT_5557_TCP_PROTO": "tcp"}
    given |= {"PORT_5557_TCP_PORT": "5557", "PORT_5557_TCP_ADDR": "10.0.0.1"}
    for service in ("", "_EVENTS", "_A__B", "_SECURITY__TENANT_QUOTAS__A", "_CONFIG"):
        environ = {f"KVRAY{service}_{name}": value for name, value in given.items()}
        assert load(environ=environ) == KVRayConfig()


@pytest.mark.parametrize(
    ("text", "environ", "given", "address", "where"),
    [
        ("", {}, None, "env:1", "RAY_ADDRESS"),
        ("ray: {timeout_s: 5}", {}, None, "env:1", "RAY_ADDRESS"),
        ("ray: {address: 'file:1'}", {}, None, "file:1", "kvray.yaml:1"),
        ("ray: {address: 'file:1'}", {"KVRAY_RAY__ADDRESS": "own:1"}, None, "own:1", "KVRAY_RAY__"),
        ("ray: {address: 'file:1'}", {}, "said:1", "said:1", ""),
        ("ray: {address: null}", {}, None, None, "kvray.yaml:1"),
        ("", {"RAY_ADDRESS": ""}, None, None, ""),
        ("", {"RAY_ADDRESS": "local"}, None, None, ""),
    ],
)
def test_ray_is_found_by_its_own_variable_if_nothing_else_names_it(
    write_yaml, text, environ, given, address, where
):
    found = config.read_effective(
        write_yaml(text),
        overrides={"ray.address": given},
        environ={"RAY_ADDRESS": "env:1", **environ},
    )
    assert found.config.ray.address == address
    assert where in found.origins.of(("ray", "address")).where


def test_no_signature_shows_the_environment():
    for name in config.__all__:
        if inspect.isfunction(one := getattr(config, name)):
            assert "environ(" not in str(inspect.signature(one)), name


def test_a_file_without_settings_means_the_defaults_which_cannot_be_changed(write_yaml):
    for text in ("", "# nothing\n", "arena:\n", "arena: {}\nray:\n"):
        assert load(write_yaml(text)) == load() == KVRayConfig()
    with pytest.raises(ValueError, match="frozen"):
        load().arena.capacity = 1


SIZES: dict[Any, int] = {"64KiB": 2**16, " 2 MiB ": 2**21, "1.5GiB": 3 * 2**29, "2TiB": 2**41}
SIZES |= {"9007199254740993": 2**53 + 1, 1e9: 10**9}
TIMES: dict[Any, float] = {
    5: 5,
    "5": 5,
    " 5 s ": 5,
    "250ms": 0.25,
    "1.5m": 90,
    "1h": 3600,
    "1d": 86400,
}
TEXTS = {0: "0B", 1023: "1023B", 1024: "1KiB", 3 * 2**29: "1.5GiB"}


def test_a_size_has_binary_units_and_a_duration_is_a_number_of_seconds_or_has_a_unit():
    assert {text: parse_size(text) for text in SIZES} == SIZES
    assert {size: format_size(size) for size in TEXTS} == TEXTS
    assert {text: load(overrides={"ray.timeout_s": text}).ray.timeout_s for text in TIMES} == TIMES


NO_SIZES: dict[str, list[Any]] = {
    "write a number with a unit such as 64GiB": ["64 gigs", "GiB", "", "1,5GiB", "1e9", "0x10"],
    "is no size; write a number": [None, True, [1], 1e400],
    "is no size; units are binary here: write 64GiB": ["64GB", "64gib", "64G", "64 Gi"],
    "is not a positive size": [0, -1, "0", "-64GiB", "0.2B", 0.5],
}


@pytest.mark.parametrize("said", NO_SIZES)
def test_what_is_no_size_is_refused_with_an_example(said):
    for value in NO_SIZES[said]:
        with pytest.raises(ValueError, match=said):
            parse_size(value)


def test_ray_kills_workers_above_a_share_of_the_memory():
    threshold, refresh = "RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms"
    assert ray_memory_threshold({threshold: "0.8"}) == 0.8
    assert ray_memory_threshold({threshold: "0.8", refresh: "0"}) == 1.0
    for environ in ({}, {threshold: "high"}, {refresh: "250"}, {refresh: "often"}):
        assert ray_memory_threshold(environ) == 0.95


def test_the_cache_lies_where_the_desktop_standard_says_or_in_the_home_directory(monkeypatch):
    assert cache_dir({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/kvray")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_dir({}) == Path("/home/ada/.cache/kvray")
    unknown = Mock(side_effect=RuntimeError("Could not determine home directory."))
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        cache_dir({})


def test_a_quota_is_for_every_namespace_or_for_one_also_by_the_environment(write_yaml):
    path = write_yaml("arena: {namespace_quota: 1GiB, quotas: {'12ab34CD': 2GiB, '0123': 5MiB}}")
    arena = load(path, environ={"KVRAY_ARENA__QUOTAS__12AB": "1GiB"}).arena
    assert arena.namespace_quota == GiB
    assert arena.quotas == {"12ab34cd": 2 * GiB, "0123": 5 * 2**20, "12ab": GiB}


# What holds on one node: the tier's settings, then its labels, then its own environment.

BIG = {"kvray.io/pool": "big"}


def tier(*nodes: dict[str, Any], **dotted: Any) -> KVRayConfig:
    overrides = {name.replace("__", "."): value for name, value in dotted.items()}
    return load(overrides={"nodes": list(nodes), **overrides})


def entry(label: str = "kvray.io/pool=big", /, **sections: Any) -> dict[str, Any]:
    return {"label": label, **sections}


def test_a_label_changes_what_its_entry_names_and_nothing_else_and_survives_its_way_by_ray():
    named = entry(arena={"capacity": "8GiB"}, nvme={"dir": "/mnt/a"})
    config = tier(named, arena__policy="lru")
    sent = pickle.loads(pickle.dumps(config))  # noqa: S301 - as Ray sends it
    assert sent == config
    there = config_on_node(sent, {}, labels=BIG)
    assert (there.arena.capacity, there.arena.policy) == (8 * GiB, "lru")
    assert there.nvme_dir == Path("/mnt/a/kvray-kvray")
    assert there.shard == config.shard
    for labels in ({}, {"kvray.io/pool": "small"}, {"pool": "big"}, None):
        assert config_on_node(config, {}, labels=labels).arena == config.arena


def test_a_later_entry_wins_setting_by_setting_and_the_node_s_own_environment_over_all():
    config = tier(
        entry(arena={"capacity": "8GiB", "free_target": 0.2}),
        entry("disk=slow", arena={"capacity": "16GiB"}),
    )
    for environ, capacity in (({}, 16 * GiB), ({CAPACITY: "2GiB"}, 2 * GiB)):
        arena = config_on_node(config, environ, labels={**BIG, "disk": "slow"}).arena
        assert (arena.capacity, arena.free_target) == (capacity, 0.2)


def test_a_label_takes_a_setting_back_and_its_quotas_stand_in_place_of_the_tier_s():
    config = tier(entry(nvme={"dir": None}), nvme__dir="/mnt/a")
    assert config_on_node(config, {}, labels=BIG).nvme.dir is None
    config = tier(entry(arena={"quotas": {"12": "1MiB"}}), arena__quotas={"34": "1MiB"})
    both = config_on_node(config, {"KVRAY_ARENA__QUOTAS__56": "2MiB"}, labels=BIG)
    assert both.arena.quotas == {"12": 2**20, "56": 2**21}
    assert config_on_node(config, {}, labels=BIG).arena.quotas == {"12": 2**20}, "a copy each time"


def test_a_quota_that_bounds_on_the_largest_nodes_only_is_fine_for_an_engine_on_a_small_one():
    config = tier(entry(arena={"capacity": "64GiB"}), arena__namespace_quota="48GiB")
    assert config.arena.namespace_quota == 48 * GiB
    assert config_on_node(config, {CAPACITY: "1GiB"}).arena.capacity == GiB
    overrides = {"arena.namespace_quota": "2GiB"}
    assert load(environ={CAPACITY: "1GiB"}, overrides=overrides).arena.capacity == GiB
    with pytest.raises(ConfigError, match="would bound nothing"):
        load(overrides={**overrides, "arena.capacity": "1GiB"})


def test_a_small_node_may_leave_the_slab_to_kvray_and_what_contradicts_itself_is_said_of_it():
    assert config_on_node(tier(), {CAPACITY: "16MiB"}).arena.capacity == 2**24
    with pytest.raises(ConfigError, match=r"^On this node: .*arena\.slab .* is larger than"):
        config_on_node(tier(arena__slab="64MiB"), {CAPACITY: "16MiB"})
    with pytest.raises(ConfigError, match=r"On this node: KVRAY_ARENA__CAPACITY: arena\.cap"):
        config_on_node(load(), {CAPACITY: "-1"})


def test_every_value_on_some_node_is_known_and_a_default_that_is_said_differs_from_none():
    config = tier(entry(arena={"capacity": "8GiB"}), entry("a=b", nvme={"flush_s": 5}))
    assert values_on_nodes(config, "arena", "capacity") == [4 * GiB, 8 * GiB]
    assert values_on_nodes(config, "nvme", "flush_s") == [60.0, 5.0]
    says = tier(entry(arena={"capacity": "4GiB", "slab": "1MiB"}), arena__capacity="8GiB")
    assert config_on_node(says, {}, labels=BIG).arena.capacity == 4 * GiB
    assert says != tier(entry(arena={"slab": "1MiB"}), arena__capacity="8GiB")


def test_a_nodes_environment_has_the_last_word_on_its_own_arena_only():
    config = tier(arena__capacity="1GiB", cluster_name="mine")
    environ = {CAPACITY: "2GiB", "KVRAY_ARENA__DIR": "/dev/shm/here"}
    environ |= {"KVRAY_SHARD__RESOURCE": "other", "KVRAY_CLUSTER_NAME": "other"}
    here = config_on_node(config, environ)
    assert here.arena.capacity == 2 * GiB
    assert here.node_dir == Path("/dev/shm/here/kvray-mine")
    assert here.shard == config.shard
