"""Requests that lack attributes, have others than they should, or raise: bypasses, never a promise.

`REQUEST_FUZZ_S` says for how many seconds a version is tried.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.trtllm.conftest import MakeEngine
from tests.trtllm.llm_request import BoundRequest, LlmRequest
from tests.trtllm.version import Version

PROMPT = list(range(100, 140))
FUZZ_S = float(os.environ.get("REQUEST_FUZZ_S", "1"))
HARMLESS = {
    "orig_prompt_len",
    "max_new_tokens",
    "state",
    "context_current_position",
    "context_chunk_size",
    "is_dummy_request",
    "kv_cache_retention_config",
    "py_num_connector_matched_tokens",
    "py_connector_prefix_end",
}
"""Attributes without influence on a request's keys and values."""
OPTIONAL = {"multimodal_item_runs", "py_prompt_embedding_table"}
"""Attributes that some versions lack; without them nothing is meant."""


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
    *(
        [[1, 2], [3]],
        [[[[]]]],
        ["a"],
        [2**70],
        [-1],
        [True],
        -1,
        2**31,
        2**63,
        2**200,
        "",
        "\ud800",
    ),
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


def fields_of(version: Version, *, is_copy: bool) -> dict[str, Any]:
    """Return those of a well-formed request of text."""
    known = version.stand_in.REQUEST_FIELDS
    request = LlmRequest(1, list(PROMPT), known=known, max_new_tokens=1)
    if is_copy:
        return vars(BoundRequest(request, version.stand_in.BOUND))
    names = {*known, *version.stand_in.BOUND}
    return {name: getattr(request, name) for name in names}


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
            broken[name] = partial(said, chance.choice(TOKENS))
        else:
            broken[name] = value = chance.choice(VALUES)
            if is_well_formed(name, value):
                continue
        # Others may be missing beside it.
        for other in chance.sample(names, chance.choice([0, 0, 0, 1, 4, len(names)])):
            if other not in (name, *OPTIONAL):
                broken.pop(other, None)
        yield f"{name}: {broken.get(name)!r} of {len(broken)}", broken


def said(tokens: Any, _beam: int) -> Any:
    return tokens


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
def test_a_request_that_is_not_as_it_should_be_is_promised_nothing(
    make_engine: MakeEngine, version: Version, is_flat: bool
) -> None:
    if not (is_flat or version.stand_in.HAS_GROUPS):
        pytest.skip("this version has one cache manager")
    engine = make_engine(is_flat=is_flat)
    assert engine.serve(PROMPT).num_hit == 0
    engine.workers[0]._rank.saver.drain()
    scheduler, fields = engine.scheduler, fields_of(version, is_copy=is_flat)
    promised, later = scheduler.get_num_new_matched_tokens(Fuzzed({**fields, "request_id": 9}), 0)
    assert (promised, later) == (36, False)
    scheduler.request_finished(Fuzzed({**fields, "request_id": 9}), [])
    until = time.monotonic() + FUZZ_S
    tries = 0
    for what, broken in damaged(fields, random.Random(version.name)):
        request = Fuzzed(broken)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False), what
        scheduler.update_state_after_alloc(request, [1])
        scheduler.request_finished(request, [1])
        tries += 1
        if time.monotonic() > until:
            break
    print(f"{version.name}, {'first' if is_flat else 'second'} manager: {tries} tries")
    engine.totals["errors"] = 0  # digests of unknown form are said in the log


def test_a_field_that_raises_is_no_defect_of_ours(
    make_engine: MakeEngine, version: Version
) -> None:
    engine = make_engine(is_flat=True)
    fields = fields_of(version, is_copy=True)
    request = Fuzzed({**fields, "lora_task_id": Raising(RuntimeError("no"))})
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert (engine.totals["bypassed_requests"], engine.totals["errors"]) == (1, 0)


@pytest.mark.parametrize("computed", [-1, -4, None, 0.0, True, "4", 44, 2**70, [4], np.int64(4)])
def test_a_start_that_is_no_number_of_tokens_is_promised_nothing(
    make_engine: MakeEngine, version: Version, computed: Any
) -> None:
    engine = make_engine(is_flat=True)
    engine.serve(PROMPT)
    engine.workers[0]._rank.saver.drain()
    request = Fuzzed({**fields_of(version, is_copy=True), "request_id": 9})
    assert engine.scheduler.get_num_new_matched_tokens(request, computed) == (0, False)


def test_no_more_is_promised_than_the_prompt_has(make_engine: MakeEngine, version: Version) -> None:
    engine = make_engine(is_flat=True)
    engine.serve(PROMPT)
    engine.workers[0]._rank.saver.drain()
    fields = fields_of(version, is_copy=True)
    for request_id, (length, expected) in enumerate(((40, 36), (13, 12), (12, 8), (1, 0)), 9):
        request = Fuzzed({**fields, "request_id": request_id, "prompt_len": length})
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (expected, False)
        engine.scheduler.request_finished(request, [])


def test_whatever_is_asked_of_requests_is_in_the_lists(
    make_engine: MakeEngine, version: Version
) -> None:
    asked: set[str] = set()

    class Listening(Fuzzed):
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattr__(name)

    engine = make_engine(is_flat=True)
    request = Listening(fields_of(version, is_copy=True))
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.scheduler.request_finished(request, [])
    unbound = {name for name in asked if not name.startswith("__")} - {*version.stand_in.BOUND}
    python = {name for name in unbound if name.startswith("py_")}
    others = set(itertools.chain(("cache_salt", "cache_salt_id"), NOWHERE))
    assert unbound - python <= others


NOWHERE = (
    "input_token_extra_ids",
    "language_adapter_uid",
    "token_type_ids",
    "multimodal_uuids",
    "multimodal_item_runs",
    "multimodal_item_run_cu_offsets",
    "multimodal_run_positions",
    "multimodal_run_lengths",
    "encoder_tokens",
    "encoder_input_features",
    "cross_attention_mask",
    "try_get_encoder_output_len",
)
"""Attributes that decide where they are there; some version's bindings lack them."""
