"""`kvray config` and `kvray connector-config`: what they print, and what is wrong."""

import json
import os
from pathlib import Path

import pytest
import yaml

from kvray.cli.config import render
from kvray.config import json_schema
from tests.forks import Done, RunKvray
from tests.unit.cli.test_app import assert_refused


@pytest.fixture
def run(call_kvray: RunKvray) -> RunKvray:
    """Return what runs a command, with a configuration of this text."""

    def run_command(*args: str | Path, text: str | None = None, **environ: str) -> Done:
        if text is not None:
            Path("kvray.yaml").write_text(text)
            args = (*args, "-c", "kvray.yaml")
        return call_kvray(*args, **environ)

    return run_command


TIER = """\
cluster_name: prod
arena:
  capacity: 64GiB
  quotas: {"12abCD": 2GiB}
staging:
  transports: [object_ref]
nodes:
  - label: kvray.io/pool=big
    arena: {capacity: 256GiB}
    nvme:
      dir: /mnt/nvme0
  - label: kvray.io/disk=slow
    nvme: {capacity: 1TiB}
"""


def origins(done: Done) -> dict[str, tuple[object, str, str | None]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        one["name"]: (one["value"], one["from"]["kind"], one["from"]["where"])
        for one in json.loads(done.stdout)["settings"]
    }


def test_every_value_says_where_it_comes_from(run):
    options = ("config", "show", "--json", "--address", "head:6379")
    found = origins(run(*options, text=TIER, KVRAY_ARENA__SLAB="128MiB"))
    assert found["cluster_name"] == ("prod", "file", "kvray.yaml:1")
    assert found["arena.capacity"] == ("64GiB", "file", "kvray.yaml:3")
    assert found["arena.quotas.12abcd"] == ("2GiB", "file", "kvray.yaml:4")
    assert found["staging.transports"] == (["object_ref"], "file", "kvray.yaml:6")
    assert found["nodes.0.arena.capacity"] == ("256GiB", "file", "kvray.yaml:9")
    assert found["arena.slab"] == ("128MiB", "environment", "KVRAY_ARENA__SLAB")
    assert found["ray.address"] == ("head:6379", "command line", None)
    assert found["arena.policy"] == ("gittins", "default", None)
    assert found["nvme.dir"] == (None, "default", None)


def test_every_setting_is_shown_and_the_schema_as_it_is(run):
    names = set(origins(run("config", "show", "--json")))
    schema = run("config", "schema").stdout
    assert schema == json_schema()
    properties = json.loads(schema)["$defs"]["ConnectorConfig"]["properties"]
    assert {f"connector.{name}" for name in properties} <= names
    assert "nodes" in names


def test_a_node_s_label_says_what_differs_there_and_its_environment_wins(run):
    options = ("config", "show", "--json", "--node-label", "kvray.io/pool=big")
    found = origins(run(*options, text=TIER))
    where = "nodes: kvray.io/pool=big (kvray.yaml:9)"
    assert found["arena.capacity"] == ("256GiB", "node", where)
    assert found["nvme.dir"][:2] == ("/mnt/nvme0", "node")
    assert found["nvme.capacity"] == ("64GiB", "default", None)
    found = origins(run(*options, text=TIER, KVRAY_ARENA__CAPACITY="8GiB"))
    assert found["arena.capacity"] == ("8GiB", "environment", "KVRAY_ARENA__CAPACITY")
    for label in ("big", "=big", "pool="):
        done = run("config", "show", "--node-label", label)
        assert (done.returncode, "write key=value" in done.stderr) == (2, True)


def test_the_table_shows_sizes_with_units_and_only_what_was_set_if_asked_for(run):
    told = "nvme: {segment: 536870912}"
    row = ["nvme.segment", "512MiB", "kvray.yaml:1"]
    lines = run("config", "show", text=told).stdout.splitlines()
    assert lines[0] == "File: kvray.yaml"
    assert row in [line.split() for line in lines]
    rows = map(str.split, run("config", "show", "--changed", text=told).stdout.splitlines())
    assert [one for one in rows if len(one) == 3][1:] == [row]
    assert "has its default" in run("config", "show", "--changed", text="").stdout


@pytest.mark.parametrize("path", [Path('/with "quotes".yaml'), Path("kvray.yaml"), None])
def test_configuration_rides_in_the_class_names(path):
    suffix = "" if path is None else f"@{Path.cwd() / path}"
    assert yaml.safe_load(render(path)) == {
        "kv_connector_config": {
            "connector_module": "kvray.connector",
            "connector_scheduler_class": f"KvRayScheduler{suffix}",
            "connector_worker_class": f"KvRayWorker{suffix}",
        },
        "kv_cache_config": {"enable_block_reuse": True, "enable_partial_reuse": False},
    }


def test_output_is_what_stdout_would_show(run):
    shown = run("connector-config", text="cluster_name: prod\n")
    written = run("connector-config", "-c", "kvray.yaml", "-o", "connector.yaml")
    assert (shown.returncode, written.returncode, written.stdout) == (0, 0, "")
    assert Path("connector.yaml").read_text() == shown.stdout


def test_a_path_that_no_yaml_can_have_or_that_cannot_be_written_is_refused(run, tmp_path):
    done = run("connector-config", "-o", "none/connector.yaml")
    assert_refused(done, tmp_path, "cannot be written")
    name = os.fsdecode(b"caf\xe9.yaml")
    (tmp_path / name).write_text("cluster_name: prod\n")
    done = run("connector-config", "-c", name, "-o", "connector.yaml")
    assert_refused(done, tmp_path, "UTF-8", kept={name})
