"""kvray, the page and the facts of `facts/*.toml` agree on each version.

A table has facts only: names, fields, orders of calls, checks at the start. Stand-ins are made of
it; which names kvray reads of TensorRT-LLM's objects is found in its source. A new version is one
more table, and a column on the page, whose rows name tests that exist.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvray.connector
from kvray.connector import base
from tests.trtllm.memory import BLOCK
from tests.trtllm.version import NAMES, NOWHERE, TABLES, Version

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "tensorrt_llm.md").read_text()
UNWRAPPED = " ".join(PAGE.split())
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "`test_" in line
]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
HALVES = ("worker", "scheduler")
METHODS = ("default", "abstract", "looked_for")
REQUEST = ("bound", "python", "with_encoder")
ENGINE = Path(kvray.__file__).parent / "engine"
HELPERS = {"field_of", "number_of", "text_of", "canonical_text", "getattr", "hasattr"}
KNOWN_AS = {
    "llm_args": "llm_args",
    "cache": "kv_cache_config",
    "mapping": "mapping",
    "request": "request",
    "report": "RequestData",
    "scheduler_output": "SchedulerOutput",
    "described": "KvCacheLayout",
    "group": "KvCacheLayerGroupLayout",
    "region": "KvCacheRegion",
    "buffer": "KvCacheBufferRef",
    "one": "KvCacheBufferRef",
    "half": "classes",
    "KvCacheConnectorScheduler": "classes",
    "KvCacheConnectorWorker": "classes",
    "utilities": "tensorrt_llm._utils",
    "tensorrt_llm": "tensorrt_llm",
}
"""The variables of kvray's connector that hold such an object, and which."""
TENSORS = ("positions", "device")
Reads = Iterator[tuple[str, str]]
"""Pairs of an object and a name that is read of it."""
Scope = dict[str, Any]
"""The object that a variable holds, or the texts that a loop gives it."""


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


def methods_of(half: dict[str, Any]) -> dict[str, list[str]]:
    return {name: one for kind in METHODS for name, one in half.get(kind, {}).items()}


def test_every_version_has_a_table_with_known_sources():
    assert set(TABLES) == set(NAMES)
    for table in TABLES.values():
        assert all(re.match("(read|inferred): ", how) for how in table["sources"].values())


def test_both_halves_take_every_call_by_its_position(version):
    for half in HALVES:
        own, table = getattr(version, f"{half}_class"), TABLES[version.name][half]
        methods = methods_of(table)
        for name in table["inherited"]:
            assert name in methods
            assert name not in vars(own)
        for name in methods.keys() - set(table["inherited"]):
            assert [*inspect.signature(vars(own)[name]).parameters][1:] == methods[name]


def test_no_half_has_a_method_that_no_version_calls(version):
    for half in HALVES:
        called = set(NOWHERE["methods"]).union(*(methods_of(one[half]) for one in TABLES.values()))
        own = vars(getattr(version, f"{half}_class"))
        assert {name for name in own if inspect.isfunction(own[name]) and name[0] != "_"} <= called


def test_every_name_that_is_read_is_in_a_table():
    tables = [facts_of(table) for table in TABLES.values()]
    known = {(one, name) for table in tables for one in table for name in table[one]}
    nowhere = {(one, name) for one, names in NOWHERE.items() for name in names}
    assert all_reads() - known - nowhere == set()
    assert nowhere & known == set(), "a version has these"


def test_no_table_has_a_name_that_nobody_reads():
    for table in (*TABLES.values(), {"reads": NOWHERE}):
        listed = table["reads"] | table.get("modules", {}) | table.get("unsure", {})
        named = {(one, name) for one, names in listed.items() for name in names if one != "methods"}
        requests = itertools.chain(*table.get("request", {}).values())
        assert named | {("request", name) for name in requests} <= all_reads()


def test_the_engine_calls_in_the_version_s_order(version, make_engine, monkeypatch):
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


def test_kvray_looks_at_every_setting_that_a_version_rejects(version):
    for check in TABLES[version.name]["rejects"]:
        known, name = f"llm_args.{check['setting']}".split(".")[-2:]
        assert (known, name) in all_reads()


def test_the_page_says_until_when_each_version_was_looked_at():
    header = next(line for line in PAGE.splitlines() if line.startswith("| |"))
    columns = [cell.strip() for cell in header.strip("|").split("|")[1:-1]]
    assert columns == [TABLES[name]["column"] for name in NAMES]
    for table in TABLES.values():
        assert (
            f"- *{table['column']}*: {table['stands_for']}. Looked at on {table['looked_at']},"
            f" in sources up to {table['newest_source']}."
        ) in UNWRAPPED


def test_without_tensorrt_llm_the_reports_are_those_of_main():
    for own in (base.RequestData, base.SchedulerOutput):
        names = [field.name for field in dataclasses.fields(own)]
        assert names == TABLES["main_line"]["records"][own.__name__]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_names_tests_that_exist(row):
    _, *versions, shown_by = row
    assert len(versions) == len(NAMES)
    assert set(versions) <= {"yes", "refused", "not there"}
    names = NAMED.findall(shown_by)
    assert names
    for file, test in names:
        assert f"\ndef {test}(" in (HERE / file).read_text()


def test_every_sentence_that_refuses_a_set_up_is_on_the_page(version):
    refusals = importlib.import_module("kvray.connector.refusals")
    policy = SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")
    transfers = SimpleNamespace(backend="DEFAULT")
    llm_args = SimpleNamespace(scheduler_config=policy, cache_transceiver_config=transfers)
    checkpoint = SimpleNamespace(recurrent="mamba", is_encoder_decoder=True, has_fp4_cache=False)
    for reasons in (
        refusals._parallelism(llm_args, asks_every_rank=True),
        refusals._decoding(llm_args, None),
        refusals._speculation(llm_args, None),
        refusals._transfers(llm_args),
        refusals._cache(llm_args, None, checkpoint),
        refusals._model(checkpoint),
    ):
        for _, sentence in reasons:
            assert f"- {sentence}" in UNWRAPPED


@functools.cache
def all_reads() -> frozenset[tuple[str, str]]:
    """Return (object, name) of all reads; kvray's engine side is given reports and nothing else."""
    found: set[tuple[str, str]] = set()
    for one in pkgutil.walk_packages(kvray.connector.__path__, "kvray.connector."):
        module = importlib.import_module(one.name)
        found |= set(_reads(ast.parse(inspect.getsource(module)), vars(module), KNOWN_AS))
    for path in ENGINE.rglob("*.py"):
        named = re.findall(r"\breport\.(\w+)|\w+\(report, \"(\w+)\"", path.read_text())
        found |= {("RequestData", name or asked) for name, asked in named}
    return frozenset(found)


def _reads(node: ast.AST, space: dict[str, Any], scope: Scope) -> Reads:
    """Yield what the code under a node reads."""
    if isinstance(node, ast.FunctionDef):
        scope = scope | dict(_assigned(node, scope))
    for loop in [node] if isinstance(node, ast.For) else getattr(node, "generators", ()):
        scope = scope | _texts_of(loop.target, loop.iter, space)
    if isinstance(node, ast.Call):
        yield from _reads_of_call(node, space, scope)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        known = scope.get(node.value.id)
        if isinstance(known, str) and not hasattr(str, node.attr):
            yield known, node.attr
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, space, scope)


def _reads_of_call(call: ast.Call, space: dict[str, Any], scope: Scope) -> Reads:
    args: list[Any] = call.args
    if ast.unparse(call).startswith("map(hasattr, repeat("):  # many names at once
        args = [args[1].args[0], args[2]]
    elif ast.unparse(call.func) not in HELPERS:
        return
    known, names = _object_of(args[0], scope), _values_of(args[1], space, scope)
    assert known, f"of what does this read: {ast.unparse(call)}"
    assert names, f"what does this read: {ast.unparse(call)}"
    if known not in TENSORS:
        yield from ((known, name) for name in ([names] if isinstance(names, str) else names))


def _assigned(function: ast.FunctionDef, scope: Scope) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            known, (target, *_) = _object_of(node.value, scope), node.targets
            if known is not None and isinstance(target, ast.Name):
                yield target.id, known


def _object_of(node: Any, scope: Scope) -> str | None:
    """Return what an expression stands for: a known object, or the field that it reads of one."""
    if isinstance(node, ast.Name):
        return scope.get(node.id, node.id if node.id in TENSORS else None)
    is_read = isinstance(node, ast.Call) and ast.unparse(node.func) in HELPERS
    return getattr(node.args[1], "value", None) if is_read else None


def _texts_of(target: Any, source: ast.AST, space: dict[str, Any]) -> Scope:
    values = _values_of(source, space, {})
    if not values:
        return {}
    if isinstance(target, ast.Tuple):
        return {one.id: column for one, *column in zip(target.elts, *values, strict=True)}
    return {target.id: values}


def _values_of(node: ast.AST, space: dict[str, Any], scope: Scope) -> Any:
    """Return the value of constants and tuples of them; None for anything else."""
    if isinstance(node, ast.Name) and node.id in scope:
        return scope[node.id]
    kinds = (ast.Constant, ast.Tuple, ast.List, ast.Starred, ast.Name, ast.Load)
    names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    is_constant = all(isinstance(one, kinds) for one in ast.walk(node))
    return eval(ast.unparse(node), space) if is_constant and set(names) <= set(space) else None
