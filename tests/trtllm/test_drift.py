"""kvray, the stand-ins and the page agree with what is known of each version: `facts/*.toml`.

A table has facts only: names, fields, orders of calls, checks at the start. A new version is one
more file, with a stand-in and a column on the page.
"""

import ast
import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvray
from kvray.errors import ConfigError
from tests.trtllm.conftest import MakeEngine
from tests.trtllm.halves import construct
from tests.trtllm.llm_request import BoundRequest, LlmRequest
from tests.trtllm.reads import all_reads
from tests.trtllm.shapes import BLOCK
from tests.trtllm.version import STAND_INS, Version, on

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it along
    import tomli as tomllib

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "tensorrt_llm.md").read_text()
TABLES = {path.stem: tomllib.loads(path.read_text()) for path in (HERE / "facts").glob("*.toml")}
NOWHERE = TABLES.pop("nowhere")
HALVES = ("worker", "scheduler")
METHODS = ("default", "abstract", "looked_for")
REQUEST = ("bound", "python", "with_encoder")


def facts_of(table: dict[str, Any]) -> dict[str, set[str]]:
    """Return the names that one table has of each object."""
    found = {known: set(names) for known, names in (table["modules"] | table["reads"]).items()}
    found["request"] = set(itertools.chain(*(table["request"].get(kind, ()) for kind in REQUEST)))
    for known, names in table["records"].items():
        found[known] = {*names, *table.get("record_methods", {}).get(known, ())}
    found["classes"] = {
        name for half in HALVES for name in (*methods_of(table[half]), *table[half]["attributes"])
    }
    return found


def names_read(known: str) -> set[str]:
    return {name for one, name in all_reads() if one == known}


def methods_of(half: dict[str, Any]) -> dict[str, list[str]]:
    return {name: one for kind in METHODS for name, one in half.get(kind, {}).items()}


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def functions_of(half: type) -> dict[str, Any]:
    """Return what a class and its bases define, without the special methods but `__init__`."""
    found = {name: one for base in half.__mro__[:-2] for name, one in vars(base).items()}
    return {
        name: one
        for name, one in found.items()
        if inspect.isfunction(one) and (name == "__init__" or not name.startswith("__"))
    }


def test_every_version_has_a_table_a_stand_in_and_known_sources() -> None:
    assert set(TABLES) == set(STAND_INS)
    for table in TABLES.values():
        assert all(re.match("(read|inferred): ", how) for how in table["sources"].values())


def test_both_halves_take_every_call_by_its_position(version: Version) -> None:
    for half in HALVES:
        own, table = getattr(version, f"{half}_class"), TABLES[version.name][half]
        methods = methods_of(table)
        for name in table["inherited"]:
            assert name in methods
            assert name not in vars(own)
        for name in methods.keys() - set(table["inherited"]):
            assert parameters_of(vars(own)[name]) == methods[name]


def test_no_half_has_a_method_that_no_version_calls(version: Version) -> None:
    for half in HALVES:
        called = set(NOWHERE["methods"]).union(*(methods_of(one[half]) for one in TABLES.values()))
        own = vars(getattr(version, f"{half}_class"))
        assert {name for name in own if inspect.isfunction(own[name]) and name[0] != "_"} <= called


def test_every_name_that_is_read_is_in_a_table() -> None:
    tables = [facts_of(table) for table in TABLES.values()]
    known = {(one, name) for table in tables for one in table for name in table[one]}
    nowhere = {(one, name) for one, names in NOWHERE.items() for name in names}
    assert all_reads() - known - nowhere == set()
    assert nowhere & known == set(), "a version has these"


def test_no_table_has_a_name_that_nobody_reads() -> None:
    for table in (*TABLES.values(), {"reads": NOWHERE}):
        listed = table["reads"] | table.get("modules", {}) | table.get("unsure", {})
        named = {(one, name) for one, names in listed.items() for name in names if one != "methods"}
        requests = itertools.chain(*table.get("request", {}).values())
        assert named | {("request", name) for name in requests} <= all_reads()


def test_stand_ins_have_the_version_s_methods(version: Version) -> None:
    for half, name in zip(
        HALVES, ("KvCacheConnectorWorker", "KvCacheConnectorScheduler"), strict=True
    ):
        base, table = vars(version.stand_in)[name], TABLES[version.name][half]
        functions = functions_of(base)
        assert {name: parameters_of(one) for name, one in functions.items()} == (
            table["default"] | table["abstract"]
        )
        assert base.__abstractmethods__ == set(table["abstract"])
        public = {name for one in base.__mro__[:-2] for name in vars(one) if name[0] != "_"}
        assert public - set(functions) == set(table["attributes"])
    kept = SimpleNamespace()
    version.stand_in.KvCacheConnectorWorker.bind_connector_meta(kept, "metadata")
    name = TABLES[version.name]["worker"]["kept_metadata"]
    assert vars(kept) == {name: "metadata"}
    assert f"self.{name}" in inspect.getsource(version.worker_class.start_load_kv)


def test_stand_ins_have_the_version_s_records(version: Version) -> None:
    records = dict(TABLES[version.name]["records"])
    settings = version.stand_in.KvCacheConnectorConfig.model_fields
    assert set(settings) == set(records.pop("KvCacheConnectorConfig"))
    every = {name for table in TABLES.values() for name in table["records"]}
    assert {name for name in every if hasattr(version.stand_in, name)} - set(records) == {
        "KvCacheConnectorConfig"
    }
    for name, fields in records.items():
        found = dataclasses.fields(vars(version.stand_in)[name])
        assert [field.name for field in found] == fields


def test_stand_ins_show_what_the_version_shows_of_requests(version: Version) -> None:
    stand_in, table = version.stand_in, TABLES[version.name]["request"]
    request = LlmRequest(1, [1], known=stand_in.REQUEST_FIELDS, max_new_tokens=1)
    copy = BoundRequest(request, stand_in.Manager.bound)
    for one, names in ((copy, table["bound"]), (request, table["bound"] + table["python"])):
        assert {name for name in names_read("request") if hasattr(one, name)} == set(names)


def test_stand_ins_have_the_version_s_arguments(version: Version) -> None:
    table = TABLES[version.name]
    args = version.stand_in.llm_args(num_ranks=1, rank=0, cache={"tokens_per_block": BLOCK})
    for known, one in (("llm_args", args), ("kv_cache_config", args.kv_cache_config)):
        has = {name for name in names_read(known) if hasattr(one, name)}
        assert has - set(table["unsure"].get(known, ())) == set(table["reads"][known])
    assert table["version"] == version.stand_in.VERSION
    assert table["module"] == version.stand_in.MODULE


def test_stand_ins_call_in_the_version_s_order(
    version: Version, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(version, monkeypatch)
    table = TABLES[version.name]
    engine = make_engine()
    started = [name for name in dict.fromkeys(calls) if name in table["start"]["calls"]]
    assert started == table["start"]["calls"]
    calls.clear()
    engine.submit(list(range(2 * BLOCK)))
    engine.step()
    assert [name for name, _ in itertools.groupby(calls)] == table["iteration"]["calls"]


def record_calls(version: Version, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the engine's calls of both halves noted, without those that kvray makes itself."""
    calls: list[str] = []
    inside: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            if not inside:
                calls.append(name)
            inside.append(name)
            try:
                return method(self, *args)
            finally:
                inside.pop()

        return call

    for half in HALVES:
        own = getattr(version, f"{half}_class")
        for name in methods_of(TABLES[version.name][half]):
            monkeypatch.setattr(own, name, noted(name, getattr(own, name)))
    return calls


def test_kvray_looks_at_every_setting_that_a_version_rejects(version: Version) -> None:
    for check in TABLES[version.name]["rejects"]:
        known, name = f"llm_args.{check['setting']}".split(".")[-2:]
        assert (known, name) in all_reads()


@on("main_line")
def test_attention_dp_is_refused_by_candidates_between_two_columns(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3.0rc29 and 1.4.0rc1 are as main without it."""
    for base in (
        version.stand_in.KvCacheConnectorWorker,
        version.stand_in.KvCacheConnectorScheduler,
    ):
        monkeypatch.delattr(base, "supports_attention_dp")
    with pytest.raises(ConfigError, match="unset enable_attention_dp"):
        construct(version, [0], num_ranks=2, cache={}, enable_attention_dp=True)


def test_the_page_says_until_when_each_version_was_looked_at() -> None:
    header = next(line for line in PAGE.splitlines() if line.startswith("| |"))
    columns = [cell.strip() for cell in header.strip("|").split("|")[1:-1]]
    assert columns == [TABLES[name]["column"] for name in STAND_INS]
    page = " ".join(PAGE.split())
    for table in TABLES.values():
        assert (
            f"- *{table['column']}*: {table['stands_for']}. Looked at on {table['looked_at']},"
            f" in sources up to {table['newest_source']}."
        ) in page


def test_without_tensorrt_llm_the_reports_are_those_of_main() -> None:
    tree = ast.parse((Path(kvray.__file__).parent / "connector" / "base.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in ("RequestData", "SchedulerOutput"):
            fields = [
                ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)
            ]
            assert fields == TABLES["main_line"]["records"][node.name]
