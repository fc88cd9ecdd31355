"""What is wrong with a configuration is said in one sentence, with its place and the fix."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvray.config import json_schema, load_config, reading, setting_rows
from kvray.errors import ConfigError
from tests.unit.config import settings_table


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WELL_KNOWN_PATH", tmp_path / "etc" / "kvray.yaml")
    monkeypatch.chdir(tmp_path)


def check_refused(*words: str, path: str | None = "kvray.yaml", **options: Any) -> None:
    """Fail unless the configuration is refused in one sentence that has these words."""
    with pytest.raises(ConfigError) as refused:
        load_config(path, **{"environ": {}, **options})
    said = " ".join(str(refused.value).split())
    assert len(said) < 500
    assert said[-1] in ".?"
    assert not re.search(r"[.?];|[?]\.|[.?] [A-Z]", said), "one sentence"
    for word in words:
        assert word in said


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
    "a size of all": (f"arena: {{capacity: {10**30}}}", "more than any machine has", "at most"),
    "a size below nothing": ("arena: {capacity: -1GiB}", "not a positive size", "64GiB"),
    "a duration of years": ("ray: {timeout_s: 9000h}", "more than a year", "for example 30s"),
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
    "nested without end": ("[" * 1500, "nested too deeply"),
    "no mapping": ("- arena", "must hold a mapping", "begin with lines such as `arena:`"),
    "a transport that is none": ("staging: {transports: [nixel]}", "did you mean nixl?"),
    "no transport": ("staging: {transports: []}", "at least 1 entry", "object_ref"),
    "a transport twice": ("staging: {transports: [nixl, nixl]}", "write [nixl]"),
    "a quota by a number": ("arena: {quotas: {1234: 1GiB}}", "in quotes"),
    "a quota above the arena": ("arena: {namespace_quota: 5GiB}", "larger than arena.capacity"),
    "twin quotas": ("arena: {quotas: {'12345678aa': 1MiB, '12345678bb': 2MiB}}", "first 8 digits"),
    "slabs smaller than slots": ("arena: {slab: 32KiB}", "raise arena.slab"),
    "a slab larger than all": ("arena: {capacity: 1GiB, slab: 2GiB}", "lower arena.slab"),
    "an arena without a slot": ("arena: {capacity: 32KiB}", "raise arena.capacity"),
    "a disk without a file": ("nvme: {capacity: 1GiB}", "lower nvme.segment"),
    "an odd file": ("nvme: {dir: /a, segment: 100KiB}", "of arena.slot_min", "write 128KiB"),
    "odd slots on disk": ("arena: {slot_min: 5000}\nnvme: {dir: /mnt/a}", "write 8KiB"),
    "a mark out of reach": ("arena: {free_target: 0.3}\nnvme: {dir: /mnt/a}", "never reached"),
    "silence between heartbeats": ("shard: {heartbeat_s: 2}", "raise shard.silent_s to 6"),
    "a path too long for a socket": (f"arena: {{dir: /{'x' * 100}}}", "shorten arena.dir"),
    "a node without a label": ("nodes: [{arena: {capacity: 1GiB}}]", "nodes.0.label is missing"),
    "a node that changes nothing": ("nodes: [{label: a=b}]", "changes nothing"),
    "a node's dir": ("nodes:\n- label: a=b\n  arena: {dir: /a}", "kvray.yaml:3", "_ARENA__DIR"),
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
    "a word of laughter": ("nodes: &a [[x, x]]\narena: {numa: *a}\n", "'interleave' or 'local'"),
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
    "a misspelt key that begins alike": ("connector: {verify: auto}", "connector.verify_on_load?"),
    "a key of the top in a section": ("ray: {cluster_name: a}", "did you mean cluster_name?"),
    "a key of a section with one underscore": ("arena_capacity: 1", "did you mean arena.capacity?"),
    "no time": ("arena: {lock_wait_s: 0}", "arena.lock_wait_s must be greater than 0"),
    "a time without end": ("arena: {lease_warn_s: .inf}", "must be a finite number"),
    "a name that leads elsewhere": ("cluster_name: ../up", "begin with a letter or a digit"),
    "a name that is too long": (f"cluster_name: {'x' * 33}", "have up to 32"),
    "a zero byte": ("\x00", "is not valid YAML"),
    "a quota by a name": ("arena: {quotas: {'model': 1GiB}}", "in quotes"),
    "a quota of nobody": ("arena: {quotas: {'': 1GiB}}", "in quotes"),
    "a quota that is no size": ("arena: {quotas: {12ab: much}}", ":1: arena.quotas.12ab: 'much'"),
}


TRIPPING = (
    "a: &a [" + "x, " * 20 + "]\nb: *a",
    "a: &a {b: *a}",
    "? [1, 2]\n: 3",
    "arena: {? {a: 1} : 2}",
    "---\na: 1\n---\nb: 2",
    "arena: !!binary '!'",
    "ray: {timeout_s: 0o9:99}",
    "arena: {capacity: " + "9" * 5000 + "}",
)
"""Files that trip readers of YAML."""


@pytest.mark.parametrize("name", [*WRONG, *TRIPPING])
def test_a_wrong_file_is_refused_in_one_sentence(name):
    text, *words = WRONG.get(name, [name])
    Path("kvray.yaml").write_text(text)
    check_refused(*words)


WRONG_VARIABLES = {
    "a misspelt key": ({"KVRAY_ARENA__CAPCITY": "1GiB"}, "did you mean KVRAY_ARENA__CAPACITY?"),
    "a misspelt section": ({"KVRAY_ARENE__CAPACITY": "1GiB"}, "did you mean KVRAY_ARENA"),
    "one underscore": ({"KVRAY_ARENA_CAPACITY": "1GiB"}, "write KVRAY_ARENA__CAPACITY"),
    "one underscore of a service": ({"KVRAY_EVENTS_PORT": "1"}, "KVRAY_EVENTS__PORT, or unset it"),
    "a whole section": ({"KVRAY_ARENA": "{}"}, "a whole section; write KVRAY_ARENA__SETTING"),
    "the cluster's name": ({"KVRAY_CLUSTERNAME": "a"}, "write KVRAY_CLUSTER_NAME"),
    "a decimal unit": ({"KVRAY_ARENA__CAPACITY": "1GB"}, "KVRAY_ARENA__CAPACITY: ", "write 1GiB"),
    "a transport": ({"KVRAY_STAGING__TRANSPORTS": "nixl,rdma"}, "'nixl' or 'object_ref'"),
    "a list of nodes": ({"KVRAY_NODES__0__LABEL": "a=b"}, "in the configuration file"),
    "all nodes at once": ({"KVRAY_NODES": "[]"}, "in the configuration file"),
    "a value for a section": ({"KVRAY_ARENA__QUOTAS": "1GiB"}, "must be a mapping"),
    "no file": ({"KVRAY_CONFIG": "nowhere.yaml"}, "nowhere.yaml", "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG_VARIABLES)
def test_a_wrong_variable_is_refused_in_one_sentence(name):
    environ, *words = WRONG_VARIABLES[name]
    check_refused(*words, path=None, environ=environ)


def test_a_value_in_the_place_of_a_section_is_refused_with_overrides_too():
    Path("kvray.yaml").write_text("arena: 5")
    check_refused("must be a section with keys, not 5", overrides={"arena.slab": "1MiB"})


def test_what_is_no_file_of_text_is_refused_and_a_pipe_not_waited_for():
    os.mkfifo("pipe.yaml")
    check_refused("pipe.yaml is a pipe", "name a file", path="pipe.yaml")
    check_refused("is a directory", "name the file in it", path=".")
    check_refused("has more than 1048576 bytes", path="/dev/zero")
    Path("kvray.yaml").write_bytes(b"cluster_name: caf\xe9\n")
    check_refused("is no UTF-8 text (byte 17 is 0xe9)", "save it as UTF-8")


# The schema says what the loader takes: what it lets pass loads, what it refuses does not.

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(json_schema())

GOOD = {
    "nothing": "{}",
    "sections without keys": "arena:\nnvme:\nnodes: []\n",
    "sizes": "arena: {capacity: 64GiB, slab: 67108864, slot_min: '65536', namespace_quota: 1.5GiB}",
    "no quota": "arena: {namespace_quota: null}",
    "quotas": "arena: {quotas: {'12ab': 2GiB}}",
    "durations": "connector: {stage_wait_s: 0, attach_retry_s: 12.5}\nray: {timeout_s: 500ms}",
    "a list": "staging: {transports: [object_ref]}",
    "nodes": "nodes: [{label: pool=big, arena: {capacity: 8GiB}, nvme: {dir: /mnt/a}}]",
    "a whole path": "nvme: {dir: /mnt/nvme0}",
}
REFUSED = (
    *("a misspelt section", "a misspelt key", "a misspelt key of a node", "a decimal unit"),
    *("a duration that is none", "a number out of range", "a word that is not offered"),
    *("a path that depends", "a name with a space", "a node without a label"),
    *("a quota by a name", "no transport", "a value for a section", "a transport that is none"),
)
"""Those of `WRONG` that a schema can tell too; others are here."""
BAD = {name: WRONG[name][0] for name in REFUSED} | {
    "too little": "arena: {holders_max: 1}",
    "a label that is none": "shard: {label: big}",
    "what no label can say": "nodes: [{label: a=b, arena: {dir: /mnt/a}}]",
}


def load(text: str) -> None:
    Path("kvray.yaml").write_text(text)
    load_config("kvray.yaml", environ={})


def test_the_schema_is_one_and_lets_nothing_but_settings_stand_anywhere():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    assert all(one["additionalProperties"] is False for one in SCHEMA["$defs"].values())


@pytest.mark.parametrize("name", GOOD)
def test_what_loads_passes_the_schema(name):
    jsonschema.validate(yaml.safe_load(GOOD[name]), SCHEMA)
    load(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_the_schema_refuses_does_not_load(name):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(BAD[name]), SCHEMA)
    with pytest.raises(ConfigError):
        load(BAD[name])


def test_the_published_schema_and_the_page_have_every_setting_as_it_is():
    command = "run `python -m tests.unit.config.settings_table`"
    assert settings_table.SCHEMA.read_text(encoding="utf-8") == json_schema(), command
    page = settings_table.PAGE.read_text(encoding="utf-8")
    assert page == settings_table.with_tables(page), command


def test_every_example_in_the_docs_passes_the_schema_and_loads():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    blocks = [block for text in texts for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    examples = 0
    for block in blocks:
        values: Any = yaml.safe_load(block)
        if isinstance(values, dict) and values.keys() <= SCHEMA["properties"].keys():
            jsonschema.validate(values, SCHEMA)
            load(block)
            examples += 1
    assert examples >= 3


def test_every_setting_says_what_it_is_and_its_default_can_be_written():
    for row in setting_rows():
        assert len(row.description) > 5, row.name
        assert row.kind, row.name
        assert ("(seconds)" in row.description) == row.name.endswith("_s"), row.name
        if row.default and row.name != "nodes":
            *sections, key = row.name.split(".")
            text = f"{key}: {row.default}"
            load(f"{sections[0]}: {{{text}}}" if sections else text)
    capacity = SCHEMA["$defs"]["ArenaConfig"]["properties"]["capacity"]
    assert (capacity["default"], "64GiB" in capacity["examples"]) == ("4GiB", True)
    assert {one["type"] for one in capacity["anyOf"]} == {"integer", "string"}
