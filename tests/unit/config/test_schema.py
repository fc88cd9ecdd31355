"""The schema says what the loader takes: what it lets pass loads, and what it refuses does not."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvray.config import json_schema, load_config, setting_rows
from kvray.errors import ConfigError
from tests.unit.config import settings_table
from tests.unit.config.test_complaint import WRONG

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
"""Those of `test_complaint.WRONG` that a schema can tell too; others are here."""
BAD = {name: WRONG[name][0] for name in REFUSED} | {
    "too little": "arena: {holders_max: 1}",
    "a label that is none": "shard: {label: big}",
    "what no label can say": "nodes: [{label: a=b, arena: {dir: /mnt/a}}]",
}


def load(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kvray.yaml"
    path.write_text(text)
    load_config(path, environ={})


def test_the_schema_is_one_and_lets_nothing_but_settings_stand_anywhere():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    assert all(one["additionalProperties"] is False for one in SCHEMA["$defs"].values())


@pytest.mark.parametrize("name", GOOD)
def test_what_loads_passes_the_schema(name, tmp_path):
    jsonschema.validate(yaml.safe_load(GOOD[name]), SCHEMA)
    load(GOOD[name], tmp_path)


@pytest.mark.parametrize("name", BAD)
def test_what_the_schema_refuses_does_not_load(name, tmp_path):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(BAD[name]), SCHEMA)
    with pytest.raises(ConfigError):
        load(BAD[name], tmp_path)


def test_the_published_schema_and_the_page_have_every_setting_as_it_is():
    command = "run `python -m tests.unit.config.settings_table`"
    assert settings_table.SCHEMA.read_text(encoding="utf-8") == json_schema(), command
    page = settings_table.PAGE.read_text(encoding="utf-8")
    assert page == settings_table.with_tables(page), command


def test_every_example_in_the_docs_passes_the_schema_and_loads(tmp_path):
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    blocks = [block for text in texts for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    examples = 0
    for block in blocks:
        values: Any = yaml.safe_load(block)
        if isinstance(values, dict) and values.keys() <= SCHEMA["properties"].keys():
            jsonschema.validate(values, SCHEMA)
            load(block, tmp_path)
            examples += 1
    assert examples >= 3


def test_every_setting_says_what_it_is_and_its_default_can_be_written(tmp_path):
    for row in setting_rows():
        assert len(row.description) > 5, row.name
        assert row.kind, row.name
        assert ("(seconds)" in row.description) == row.name.endswith("_s"), row.name
        if row.default and row.name != "nodes":
            *sections, key = row.name.split(".")
            text = f"{key}: {row.default}"
            load(f"{sections[0]}: {{{text}}}" if sections else text, tmp_path)
    capacity = SCHEMA["$defs"]["ArenaConfig"]["properties"]["capacity"]
    assert (capacity["default"], "64GiB" in capacity["examples"]) == ("4GiB", True)
    assert {one["type"] for one in capacity["anyOf"]} == {"integer", "string"}
