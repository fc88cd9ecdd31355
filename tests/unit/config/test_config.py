import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# Sources and their order.


def test_without_any_source_the_defaults_hold():
    assert load() == KVRayConfig()


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


def test_variables_name_the_cluster_and_give_numbers():
    given = load(environ={"KVRAY_CLUSTER_NAME": "blue", "KVRAY_ARENA__HOLDERS_MAX": "16"})
    assert (given.cluster_name, given.arena.holders_max) == ("blue", 16)


SERVICES = [
    "kvray",
    "kvray-events",
    "kvray-a--b",
    "kvray-security--tenant-quotas--a",
    "kvray-config",
]


@pytest.mark.parametrize("service", SERVICES)
def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(service):
    name = service.upper().replace("-", "_")
    url = "tcp://10.0.0.1:5557"
    environ = {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "5557",
        f"{name}_SERVICE_PORT_HTTP": "5557",
        f"{name}_PORT": url,
        f"{name}_PORT_5557_TCP": url,
        f"{name}_PORT_5557_TCP_PROTO": "tcp",
        f"{name}_PORT_5557_TCP_PORT": "5557",
        f"{name}_PORT_5557_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ) == KVRayConfig()


def test_a_variable_with_one_underscore_is_no_service_s():
    with pytest.raises(ConfigError, match="write KVRAY_EVENTS__PORT, or unset it"):
        load(environ={"KVRAY_EVENTS_PORT": "5557"})
    with pytest.raises(ConfigError, match="a whole section; write KVRAY_ARENA__SETTING"):
        load(environ={"KVRAY_ARENA": '{"capacity": "1GiB"}'})


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


def test_a_variable_names_a_tenant_as_it_is_written():
    environ = {
        "KVRAY_SECURITY__TENANT_QUOTAS__Alice": "1GiB",
        "KVRAY_SECURITY__TENANT_SECRET_FILE": "/secret",
    }
    found = config.read_effective(None, environ=environ).config
    assert found.security.tenant_quotas == {"Alice": 2**30}


def test_no_signature_shows_the_environment():
    for name in config.__all__:
        if inspect.isfunction(one := getattr(config, name)):
            assert "environ(" not in str(inspect.signature(one)), name


# Files.


@pytest.mark.parametrize("text", ["", "# nothing\n", "arena:\n", "arena: {}\nray:\n"])
def test_a_file_without_settings_means_the_defaults(write_yaml, text):
    assert load(write_yaml(text)) == KVRayConfig()


# Keys and values.


def test_a_configuration_cannot_be_changed_after_it_was_read():
    with pytest.raises(ValueError, match="frozen"):
        load().arena.capacity = 1


def test_the_files_of_a_node_lie_under_the_name_of_the_cluster():
    given = load(overrides={"cluster_name": "blue", "arena.dir": "/mnt/huge"})
    assert given.node_dir == Path("/mnt/huge/kvray-blue")


# Sizes.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("64KiB", 2**16),
        (" 2 MiB ", 2**21),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("9007199254740993", 2**53 + 1),
        (1e9, 10**9),
    ],
)
def test_a_size_is_read_in_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            ["64 gigs", "GiB", "", "1,5GiB", "1e9", "0x10", None, True, [1], 1e400],
            "is no size; write a number with a unit such as 64GiB",
        ),
        (["64GB", "64gib", "64G", "64 Gi"], "is no size; units are binary here: write 64GiB"),
        ([0, -1, "0", "-64GiB", "0.2B", 0.5], "is not a positive size"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example(values, said):
    for value in values:
        with pytest.raises(ValueError, match=said):
            parse_size(value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (3 * 2**29, "1.5GiB")]
)
def test_a_size_is_written_in_the_largest_unit_that_fits(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30),
        ("30", 30),
        (" 30 s ", 30),
        ("250ms", 0.25),
        ("1.5m", 90),
        ("1h", 3600),
        ("1d", 86400),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_has_a_unit(text, seconds):
    assert load(overrides={"ray.timeout_s": text}).ray.timeout_s == seconds


# What Ray is told by its environment.


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_usage_threshold": "high"}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8", "RAY_memory_monitor_refresh_ms": "0"}, 1.0),
        ({"RAY_memory_monitor_refresh_ms": "250"}, 0.95),
        ({"RAY_memory_monitor_refresh_ms": "often"}, 0.95),
    ],
)
def test_ray_kills_workers_above_a_share_of_the_memory(environ, share):
    assert ray_memory_threshold(environ) == share


# The cache directory.


def test_the_cache_lies_where_the_desktop_standard_says_or_in_the_home_directory(monkeypatch):
    assert cache_dir({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/kvray")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_dir({}) == Path("/home/ada/.cache/kvray")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        cache_dir({})


def test_a_nodes_environment_has_the_last_word_on_its_own_arena_only():
    tier = load(overrides={"arena.capacity": "1GiB", "cluster_name": "mine"})
    environ = {"KVRAY_ARENA__CAPACITY": "2GiB", "KVRAY_ARENA__DIR": "/dev/shm/here"}
    environ |= {"KVRAY_SHARD__RESOURCE": "other", "KVRAY_CLUSTER_NAME": "other"}
    here = config_on_node(tier, environ)
    assert here.arena.capacity == 2 * GiB
    assert here.node_dir == Path("/dev/shm/here/kvray-mine")
    assert here.shard == tier.shard


def test_a_wrong_variable_of_a_node_is_named():
    with pytest.raises(ConfigError, match=r"On this node: KVRAY_ARENA__CAPACITY: arena\.cap"):
        config_on_node(load(), {CAPACITY: "-1"})


# Quotas of namespaces.


def test_a_quota_is_for_every_namespace_or_for_one_also_by_the_environment(write_yaml):
    path = write_yaml("arena: {namespace_quota: 1GiB, quotas: {'12ab34CD': 2GiB, '0123': 5MiB}}")
    arena = load(path, environ={"KVRAY_ARENA__QUOTAS__12AB": "1GiB"}).arena
    assert arena.namespace_quota == GiB
    assert arena.quotas == {"12ab34cd": 2 * GiB, "0123": 5 * 2**20, "12ab": GiB}
