"""Any file and any environment is a configuration, or one sentence that says what is wrong."""

import contextlib
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvray.config import KVRayConfig, config_on_node, format_size, load_config, parse_size
from kvray.errors import ConfigError
from tests.examples import examples
from tests.unit.mutations import ANY_JSON, changed_bytes, changed_json

fuzzed = settings(
    max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture]
)

SECTIONS = {
    name: sorted(getattr(field.annotation, "model_fields", {}))
    for name, field in KVRayConfig.model_fields.items()
}
VALUES = (
    ANY_JSON
    | st.sampled_from(["1GiB", "-1B", "1e3KiB", "9" * 400 + "TiB", ".inf", "0x10", "0"])
    | st.dates()
    | st.binary(max_size=9)
    | st.dictionaries(st.integers() | st.dates(), ANY_JSON, max_size=3)
)


@st.composite
def trees(draw: st.DrawFn) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=4)):
        if SECTIONS[name] and draw(st.booleans()):
            keys = st.sampled_from(SECTIONS[name]) | st.text(max_size=5)
            tree[name] = draw(st.dictionaries(keys, VALUES, max_size=4))
        else:
            tree[name] = draw(VALUES)
    return tree


def written(tmp_path: Path, tree: Any) -> Path:
    path = tmp_path / "kvray.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="replace")
    return path


@fuzzed
@given(tree=trees())
def test_a_file_with_any_values_is_read_or_refused(tmp_path, tree):
    with contextlib.suppress(ConfigError):
        config = load_config(written(tmp_path, tree), environ={})
        assert config_on_node(config, {}) == config


WHOLE: dict[str, Any] = yaml.safe_load("""
cluster_name: prod
arena: {dir: /dev/shm, capacity: 64GiB, slab: 64MiB, numa: local, lock_wait_s: 0.002,
  namespace_quota: 48GiB, quotas: {ab: 1GiB}}
nvme: {dir: /nvme, capacity: 1TiB, flush_s: 60}
shard: {label: pool=gpu, heartbeat_s: 0.5}
staging: {transports: [nixl, object_ref], deadline_s: 5}
connector: {replica: r, stage_wait_s: 0.05, model_key: m}
nodes: [{label: disk=big, nvme: {capacity: 2TiB}}]
ray: {address: auto}
""")
LIKELY = VALUES | st.sampled_from([0, 1, 0.5, -1, "1GiB", "1B", "/dev/shm", "", "a=b", 1e999, []])


@fuzzed
@given(tree=changed_json(WHOLE, LIKELY, changes_max=2))
@example(WHOLE)
def test_a_configuration_with_something_changed_is_read_as_it_says_or_refused_in_a_line(
    tmp_path, tree
):
    try:
        config = load_config(written(tmp_path, tree), environ={})
    except ConfigError as error:
        assert tree != WHOLE, "what is changed is a configuration"
        said = str(error)
        assert "\n" not in said
        assert len(said) < 2_000
        return
    again = written(tmp_path, config.model_dump(mode="json", exclude_unset=True))
    assert load_config(again, environ={}) == config


@fuzzed
@given(text=st.binary(max_size=200) | changed_bytes(yaml.safe_dump(WHOLE).encode()))
def test_a_file_of_any_bytes_is_read_or_refused(tmp_path, text):
    path = tmp_path / "kvray.yaml"
    path.write_bytes(text)
    with contextlib.suppress(ConfigError):
        load_config(path, environ={})


@fuzzed
@given(
    environ=st.dictionaries(
        st.sampled_from(
            [f"KVRAY_{one}__{key}".upper() for one, keys in SECTIONS.items() for key in keys]
            + ["KVRAY_CLUSTER_NAME", "KVRAY_ARENA__QUOTAS__FF", "KVRAY___", "KVRAY_A__B__C__D"]
        ),
        st.text(max_size=20) | st.sampled_from(["1GiB", "1", "true", "[]", "{}"]),
        max_size=4,
    )
)
def test_an_environment_of_any_values_is_read_or_refused(environ):
    with contextlib.suppress(ConfigError):
        load_config("/dev/null", environ=environ)
    with contextlib.suppress(ConfigError):
        config_on_node(KVRayConfig(), environ)


@given(st.integers(1, 2**60))
def test_a_size_is_read_as_it_was_written(size):
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size
    assert format_size(size)


@given(VALUES)
def test_any_value_is_a_size_or_none(value):
    with contextlib.suppress(ValueError):
        assert parse_size(value) > 0
