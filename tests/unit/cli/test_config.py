"""`kvray config` and `kvray connector-config`: what they print, and what is wrong."""

import json
import os
import re
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


# What holds, and where it comes from.

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


def test_every_setting_is_shown(run):
    names = set(origins(run("config", "show", "--json")))
    properties = json.loads(json_schema())["$defs"]["ConnectorConfig"]["properties"]
    assert {f"connector.{name}" for name in properties} <= names
    assert "nodes" in names


def test_a_node_s_label_says_what_differs_there(run):
    options = ("config", "show", "--json", "--node-label", "kvray.io/pool=big")
    found = origins(run(*options, text=TIER))
    where = "nodes: kvray.io/pool=big (kvray.yaml:9)"
    assert found["arena.capacity"] == ("256GiB", "node", where)
    assert found["nvme.dir"][:2] == ("/mnt/nvme0", "node")
    assert found["nvme.capacity"] == ("64GiB", "default", None)


def test_a_node_s_environment_wins_over_its_labels(run):
    options = ("config", "show", "--json", "--node-label", "kvray.io/pool=big")
    found = origins(run(*options, text=TIER, KVRAY_ARENA__CAPACITY="8GiB"))
    assert found["arena.capacity"] == ("8GiB", "environment", "KVRAY_ARENA__CAPACITY")


def test_only_what_was_set_is_shown_if_asked_for(run):
    done = run("config", "show", "--changed", text="arena: {capacity: 8GiB}")
    rows = [line.split() for line in done.stdout.splitlines() if "arena." in line]
    assert rows == [["arena.capacity", "8GiB", "kvray.yaml:1"]]
    assert "has its default" in run("config", "show", "--changed", text="").stdout


def test_the_table_names_the_file_and_shows_sizes_with_units(run):
    lines = run("config", "show", text="nvme: {segment: 536870912}").stdout.splitlines()
    assert lines[0] == "File: kvray.yaml"
    assert ["nvme.segment", "512MiB", "kvray.yaml:1"] in [line.split() for line in lines]


def test_the_schema_is_printed_as_it_is(run):
    assert run("config", "schema").stdout == json_schema()


@pytest.mark.parametrize("label", ["big", "=big", "pool="])
def test_a_label_without_key_or_value_is_refused(run, label):
    done = run("config", "show", "--node-label", label)
    assert done.returncode == 2
    assert "write key=value" in done.stderr


# What is wrong with it: the text of a file, and what the one sentence must say of it.

WRONG = {
    "a misspelt section": ("arean: {}", "kvray.yaml:1", "did you mean arena?"),
    "a misspelt key": ("arena:\n  capcity: 1GiB", "kvray.yaml:2", "did you mean arena.capacity?"),
    "a key without its section": ("capacity: 1GiB", "arena.capacity or nvme.capacity"),
    "a key in another section": ("nvme: {slab: 1GiB}", "did you mean arena.slab?"),
    "a key with its section in one": ("arena.capacity: 1GiB", "write `arena: {capacity: ...}`"),
    "another way to write names": ("clusterName: a", "did you mean cluster_name?"),
    "a key that resembles none": ("arena: {zzz: 1}", "remove it, or take one of capacity"),
    "a misspelt key of a node": ("nodes: [{label: a=b, arena: {capcity: 1}}]", "arena.capacity?"),
    "a decimal unit": ("arena: {capacity: 64GB}", "write 64GiB"),
    "a short unit": ("arena: {capacity: 64Gi}", "write 64GiB"),
    "no size": ("arena: {capacity: much}", "a unit such as 64GiB"),
    "a size below nothing": ("arena: {capacity: -1GiB}", "not a positive size", "64GiB"),
    "a duration with a unit": ("ray: {timeout_s: 500ms}", "write the number of seconds, 0.5"),
    "a duration that is none": ("ray: {timeout_s: yes}", "no number of seconds", "such as 30"),
    "a word for a number": ("ray: {timeout_s: soon}", "must be a number", "such as 30.0"),
    "a number out of range": ("arena: {free_target: 2}", "less than or equal to 0.9", "0.05"),
    "half of a process": ("arena: {holders_max: 4.5}", "must be a whole number", "256"),
    "a word that is not offered": ("arena: {numa: interleaved}", "did you mean interleave?"),
    "a number for a text": ("ray: {address: 6379}", "must be a text, not 6379; put it in quotes"),
    "a name with a space": ("cluster_name: two words", "begin with a letter or a digit"),
    "a value for a section": ("arena: 1GiB", "must be a section with keys", "capacity"),
    "a list for a section": ("arena: [capacity]", "must be a section with keys"),
    "a key without a value": ("arena:\n  capacity:\n", "kvray.yaml:2", "has no value", "4GiB"),
    "a path that depends": ("arena: {dir: shm}", "write the whole path"),
    "a key twice": ("arena: {}\nray: {}\narena: {}", "kvray.yaml:3", "stands in line 1 already"),
    "a key of a section twice": ("arena: {slab: 1MiB, slab: 2MiB}", "arena.slab stands in line 1"),
    "a tab": ("arena:\n\tcapacity: 1GiB", "kvray.yaml:2", "spaces, not with tabs"),
    "an open bracket": ("arena: [", "not valid YAML", "check indentation, brackets"),
    "two colons": ("cluster_name: a: b", "kvray.yaml:1", "a line of its own"),
    "a tag": ("arena: !!python/object:os.system {}", "without a tag"),
    "a date that is none": ("cluster_name: 2026-13-45", "put the value in quotes"),
    "nested without end": ("[" * 5000, "nested too deeply"),
    "no mapping": ("- arena", "must hold a mapping", "begin with lines such as `arena:`"),
    "a transport that is none": ("staging: {transports: [nixel]}", "did you mean nixl?"),
    "no transport": ("staging: {transports: []}", "at least 1 entry", "object_ref"),
    "a transport twice": ("staging: {transports: [nixl, nixl]}", "write [nixl]"),
    "a quota by a number": ("arena: {quotas: {1234: 1GiB}}", "in quotes"),
    "a quota above the arena": ("arena: {namespace_quota: 5GiB}", "larger than arena.capacity"),
    "quotas for the same": (
        "arena: {quotas: {'12345678aa': 1MiB, '12345678bb': 2MiB}}",
        "first 8 digits only",
    ),
    "slabs smaller than slots": ("arena: {slab: 32KiB}", "raise arena.slab"),
    "a slab larger than all": ("arena: {capacity: 1GiB, slab: 2GiB}", "lower arena.slab"),
    "an arena without a slot": ("arena: {capacity: 32KiB}", "raise arena.capacity"),
    "a disk without a file": ("nvme: {capacity: 1GiB}", "lower nvme.segment"),
    "a file of odd slots": (
        "nvme: {dir: /mnt/a, segment: 100KiB}\n",
        "multiple of arena.slot_min",
        "write 128KiB",
    ),
    "odd slots on disk": ("arena: {slot_min: 5000}\nnvme: {dir: /mnt/a}", "write 8KiB"),
    "a mark that is never reached": (
        "arena: {free_target: 0.3}\nnvme: {dir: /mnt/a}",
        "never reached",
    ),
    "silence between heartbeats": ("shard: {heartbeat_s: 2}", "raise shard.silent_s to 6"),
    "a path too long for a socket": (f"arena: {{dir: /{'x' * 100}}}", "shorten arena.dir"),
    "a node without a label": ("nodes: [{arena: {capacity: 1GiB}}]", "nodes.0.label is missing"),
    "a node that changes nothing": ("nodes: [{label: a=b}]", "changes nothing"),
    "what no label can say": (
        "nodes:\n- label: a=b\n  arena: {dir: /mnt/a}",
        "kvray.yaml:3",
        "KVRAY_ARENA__DIR",
    ),
    "laughter without end": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
        + "arena: {capacity: *a11}\n",
        "Unknown setting a0",
    ),
    "a size of laughter": (
        "cluster_name: &a0 [x, x, x]\n"
        + f"staging: &a1 [{', '.join(['*a0'] * 9)}]\narena: {{capacity: *a1}}\n",
        "kvray.yaml:1",
    ),
    "a word of laughter": (
        "nodes: &a [[x, x]]\narena: {numa: *a}\n",
        "'interleave' or 'local'",
    ),
    "a long name": ("x" * 1000 + ": 1", "Unknown setting xxx", "remove it"),
    "a word without end": ("arena: {numa: " + "x" * 100_000 + "}", "'interleave' or 'local'"),
    "a list without end": ("arena: {capacity: &a [*a]}", "a unit such as 64GiB"),
    "a number for a key": ("7: arena", "remove it, or take one of arena"),
    "a truth for a key": ("arena: {on: 1}", "remove it, or take one of capacity"),
    "a quota of tenants above the arena": (
        "security: {tenant_secret_file: /s, tenant_quota: 5GiB}",
        "lower it, or raise arena.capacity",
    ),
    "a quota of tenants without any": (
        "security: {tenant_quotas: {a: 1GiB}}",
        "kvray.yaml:1: security.tenant_quotas needs security.tenant_secret_file",
    ),
    "a quota of namespaces beside tenants": (
        "security: {tenant_secret_file: /s}\narena: {quotas: {'12': 1GiB}}",
        "kvray.yaml:2: arena.quotas bounds no tenants",
    ),
    "a node that contradicts the tier": (
        "nodes:\n- {label: c=d, nvme: {dir: /a}}\n- {label: a=b, arena: {slab: 1GiB}}\n"
        "- {label: a=b, arena: {capacity: 64MiB}}",
        "On nodes with a=b: nodes: a=b (kvray.yaml:3)",
        "lower arena.slab",
    ),
}


def assert_one_sentence(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvray: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 500
    assert done.stderr.rstrip()[-1] in ".?"
    assert not re.search(r"[.?];|[?]\.|[.?] [A-Z]", done.stderr), "one sentence"
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused_in_one_sentence(run, name):
    text, *words = WRONG[name]
    assert_one_sentence(run("config", "show", text=text), *words)
    assert os.listdir() == ["kvray.yaml"]


WRONG_VARIABLES = {
    "a misspelt key": ({"KVRAY_ARENA__CAPCITY": "1GiB"}, "did you mean KVRAY_ARENA__CAPACITY?"),
    "a misspelt section": ({"KVRAY_ARENE__CAPACITY": "1GiB"}, "did you mean KVRAY_ARENA"),
    "one underscore": ({"KVRAY_ARENA_CAPACITY": "1GiB"}, "write KVRAY_ARENA__CAPACITY"),
    "the cluster's name": ({"KVRAY_CLUSTERNAME": "a"}, "write KVRAY_CLUSTER_NAME"),
    "a decimal unit": ({"KVRAY_ARENA__CAPACITY": "1GB"}, "KVRAY_ARENA__CAPACITY: ", "write 1GiB"),
    "a transport": ({"KVRAY_STAGING__TRANSPORTS": "nixl,rdma"}, "'nixl' or 'object_ref'"),
    "a list of nodes": ({"KVRAY_NODES__0__LABEL": "a=b"}, "in the configuration file"),
    "a value for a section": ({"KVRAY_ARENA__QUOTAS": "1GiB"}, "must be a mapping"),
    "a file that is not there": (
        {"KVRAY_CONFIG": "nowhere.yaml"},
        "nowhere.yaml",
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", WRONG_VARIABLES)
def test_a_wrong_variable_is_refused_in_one_sentence(run, name):
    environ, *words = WRONG_VARIABLES[name]
    assert_one_sentence(run("config", "show", **environ), *words)


def test_a_directory_is_refused_for_a_file(run):
    assert_one_sentence(run("config", "show", "-c", "."), "is a directory", "name the file in it")


def test_a_file_that_is_no_text_is_refused(run):
    Path("kvray.yaml").write_bytes(b"cluster_name: caf\xe9\n")
    done = run("config", "show", "-c", "kvray.yaml")
    assert_one_sentence(done, "is no UTF-8 text (byte 17 is 0xe9)", "save it as UTF-8")


def test_a_file_without_an_end_is_refused(run):
    assert_one_sentence(run("config", "show", "-c", "/dev/zero"), "has more than 1048576 bytes")


def test_a_process_of_its_own_leaves_nothing_behind(run_kvray, tmp_path):
    text, *words = WRONG["a slab larger than all"]
    (tmp_path / "kvray.yaml").write_text(text)
    done = run_kvray("up", "-c", "kvray.yaml")
    assert_refused(done, tmp_path, *words, kept={"kvray.yaml"})
    assert "Traceback" not in done.stderr


KV_CACHE_CONFIG = {"enable_block_reuse": True, "enable_partial_reuse": False}


def test_configuration_rides_in_the_class_names(tmp_path):
    path = tmp_path / 'with space and "quotes".yaml'
    options = yaml.safe_load(render(path))
    assert options == {
        "kv_connector_config": {
            "connector_module": "kvray.connector",
            "connector_scheduler_class": f"KvRayScheduler@{path}",
            "connector_worker_class": f"KvRayWorker@{path}",
        },
        "kv_cache_config": KV_CACHE_CONFIG,
    }


def test_relative_path_is_made_absolute():
    options = yaml.safe_load(render(Path("kvray.yaml")))
    name = options["kv_connector_config"]["connector_worker_class"]
    assert name == f"KvRayWorker@{Path.cwd() / 'kvray.yaml'}"


def test_without_a_file_the_engine_looks_for_its_configuration():
    options = yaml.safe_load(render(None))
    assert options["kv_connector_config"]["connector_scheduler_class"] == "KvRayScheduler"
    assert options["kv_connector_config"]["connector_worker_class"] == "KvRayWorker"


def test_output_is_what_stdout_would_show(run):
    shown = run("connector-config", text="cluster_name: prod\n")
    written = run("connector-config", "-c", "kvray.yaml", "-o", "connector.yaml")
    assert (shown.returncode, written.returncode, written.stdout) == (0, 0, "")
    assert Path("connector.yaml").read_text() == shown.stdout


def test_output_that_cannot_be_written_is_refused(run):
    done = run("connector-config", "-o", "no/such/dir/connector.yaml")
    assert_one_sentence(done, "cannot be written")
