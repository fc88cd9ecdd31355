"""Which names kvray reads of TensorRT-LLM's objects, found in its source."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvray.connector

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
