"""Requests that lack attributes, have others than they should, or raise: bypasses, never a promise.

`REQUEST_FUZZ_S` says for how many seconds a version is tried.
"""

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.trtllm.conftest import PROMPT, MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK
from tests.trtllm.version import Version, copy_of
from tests.waiting import wait_for

FUZZ_S = float(os.environ.get("REQUEST_FUZZ_S", "1"))
HARMLESS = {"py_num_connector_matched_tokens"}
"""Without influence on a request's keys and values."""
OPTIONAL = {"multimodal_item_runs"}
"""Some versions lack it; without it nothing is meant."""


class Weird:
    """As a number, a text and a list; none of them is the engine's."""

    def __index__(self) -> int:
        return 3

    def __len__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "weird"


class Raising:
    """A field that raises when it is read."""

    def __init__(self, error: Exception) -> None:
        self.error = error


ERRORS = [RuntimeError("no"), TypeError("no"), ValueError("no"), MemoryError(), KeyError("no")]
VALUES: list[Any] = [
    *(True, False, 0.5, float("nan"), b"", b"x", object(), Weird(), int, ..., {1}, {"a": 1}),
    *(np.int64(3), np.float32(1), np.zeros(0), np.ones(3, np.int64), (), ((),), [[]], [None]),
    *([[1, 2], [3]], [[[[]]]], ["a"], [2**70], [-1], [True], -1, 2**31, 2**63, 2**200),
    *("", "\ud800"),
]
TOKENS: list[Any] = [
    *(None, (), [], "tokens", b"tokens", {1: 2}, set(PROMPT), tuple(PROMPT), iter(PROMPT), 3),
    *([PROMPT], [*PROMPT[:-1], None], [*PROMPT, 2**31], [float(one) for one in PROMPT]),
    *([*PROMPT, "a"], np.array(PROMPT), np.array(PROMPT, dtype=float), [np.array(PROMPT)]),
]


class Fuzzed:
    """A request, one of whose fields is `value`, raises or is not there."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(name)
        value = self._fields[name]
        if isinstance(value, Raising):
            raise value.error
        return value


def fields_of(version: Version, *, is_copy: bool = True, **changes: Any) -> dict[str, Any]:
    """Return those of a well-formed request of text."""
    known = version.request_fields
    request = LlmRequest(1, list(PROMPT), known=known, max_new_tokens=1)
    return vars(copy_of(request, version.bound if is_copy else version.shown)) | changes


@pytest.fixture
def scheduler(make_engine: MakeEngine) -> Any:
    """The scheduler of an engine that has saved PROMPT, by the first cache manager."""
    return serving(make_engine, is_flat=True).scheduler


def serving(make_engine: MakeEngine, *, is_flat: bool) -> Engine:
    engine = make_engine(is_flat=is_flat)
    assert engine.serve(PROMPT).num_hit == 0
    wait_for(lambda: engine.totals["stored_blocks"] == len(PROMPT) // BLOCK)
    return engine


def damaged(fields: dict[str, Any], chance: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests without end, each with what is wrong with it."""
    names = sorted(fields.keys() - HARMLESS)
    while True:
        name = chance.choice(names)
        broken = dict(fields)
        kind = chance.randrange(3)
        if kind == 0 and name not in OPTIONAL:
            del broken[name]
        elif kind == 1:
            broken[name] = Raising(chance.choice(ERRORS))
        elif name == "get_tokens":
            tokens = chance.choice(TOKENS)
            broken[name] = lambda _beam, tokens=tokens: tokens
        else:
            broken[name] = value = chance.choice(VALUES)
            if is_well_formed(name, value):
                continue
        # Others may be missing beside it.
        for other in chance.sample(names, chance.choice([0, 0, 0, 1, 4, len(names)])):
            if other not in (name, *OPTIONAL):
                broken.pop(other, None)
        yield f"{name}: {broken.get(name)!r} of {len(broken)}", broken


def is_well_formed(name: str, value: Any) -> bool:
    """Whether a request of text could have that."""
    if name == "request_id":
        return type(value) is int and 0 <= value < 2**64
    if name == "prompt_len":
        return type(value) is int and 3 < value <= len(PROMPT)
    if name == "is_generation_only_request":
        return value is False
    return type(value) is list and not value and name.startswith("multimodal_")


@pytest.mark.parametrize("is_flat", [True, False], ids=["first_manager", "second_manager"])
def test_a_request_that_is_not_as_it_should_be_is_promised_nothing(make_engine, version, is_flat):
    if not (is_flat or version.has_groups):
        pytest.skip("this version has one cache manager")
    engine = serving(make_engine, is_flat=is_flat)
    scheduler, fields = engine.scheduler, fields_of(version, is_copy=is_flat)
    assert scheduler.get_num_new_matched_tokens(Fuzzed({**fields, "request_id": 9}), 0)[0] == 36
    scheduler.request_finished(Fuzzed({**fields, "request_id": 9}), [])
    until = time.monotonic() + FUZZ_S
    for what, broken in damaged(fields, random.Random(version.name)):
        request = Fuzzed(broken)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False), what
        scheduler.update_state_after_alloc(request, [1])
        scheduler.request_finished(request, [1])
        if time.monotonic() > until:
            break
    engine.totals["errors"] = 0  # digests of unknown form are said in the log


def test_a_field_that_raises_is_no_defect_of_ours(make_engine, version):
    engine = make_engine(is_flat=True)
    request = Fuzzed(fields_of(version, lora_task_id=Raising(RuntimeError("no"))))
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert (engine.totals["bypassed_requests"], engine.totals["errors"]) == (1, 0)


@pytest.mark.parametrize("computed", [-1, -4, None, 0.0, True, "4", 44, 2**70, [4], np.int64(4)])
def test_a_start_that_is_no_number_of_tokens_is_promised_nothing(scheduler, version, computed):
    request = Fuzzed(fields_of(version, request_id=9))
    assert scheduler.get_num_new_matched_tokens(request, computed) == (0, False)


def test_no_more_is_promised_than_the_prompt_has(scheduler, version):
    for request_id, (length, expected) in enumerate(((40, 36), (13, 12), (12, 8), (1, 0)), 9):
        request = Fuzzed(fields_of(version, request_id=request_id, prompt_len=length))
        assert scheduler.get_num_new_matched_tokens(request, 0) == (expected, False)
        scheduler.request_finished(request, [])
