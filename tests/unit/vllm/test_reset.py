"""vLLM's word that its cache is to be forgotten takes it off the tier until a version is named."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.engine.shared_state import shared_state_for
from tests.kit.apart import ARGS, Apart
from tests.kit.connector import HIT, PROMPT
from tests.unit.connector.conftest import environment, running_shard, shard
from tests.unit.vllm.test_read import request as request_of

__all__ = ["environment", "running_shard", "shard"]

VLLM = replace(ARGS, holds_loads=True, takes_offers_later=True)


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the scheduler's half, which needs of vLLM only the names of three classes."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    base: Any = ModuleType(name)
    base.KVConnectorMetadata = base.KVConnectorHandshakeMetadata = object
    base.KVConnectorWorkerMetadata = object
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, base)
    before = set(sys.modules)
    yield importlib.import_module("kvray.vllm.scheduling")
    for made in set(sys.modules) - before:
        if made.startswith("kvray.vllm"):
            del sys.modules[made]


def asked(name: str) -> SimpleNamespace:
    return request_of(request_id=name, prompt_token_ids=PROMPT, all_token_ids=PROMPT)


def hold(half: Any) -> None:
    """Have the ranks hold all that they are to hold, in a pass that has no request."""
    lists = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": []}
    cached = SimpleNamespace(**lists, resumed_req_ids=set())
    output = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
    )
    for one in half.plan(output).holds:
        half._holds.hear({one.hold_id: one.num_blocks}, {one.hold_id: 1})


def ask(half: Any, name: str) -> int | None:
    request = asked(name)
    hit: int | None = half.ask(request, 0)
    if hit is None:
        hold(half)
        hit = half.ask(request, 0)
    half.allocated(request, 0)
    half.finish(name)
    return hit


@pytest.fixture
def half(shard: Shard, scheduling: Any) -> Iterator[Any]:
    """A scheduler's half beside an engine that has stored the prompt."""
    from kvray.vllm.metadata import PoolMetadata

    stored = Apart()
    made = scheduling.SchedulingHalf(shared_state_for(object(), VLLM, load_config(None)))
    try:
        stored.serve(PROMPT)
        made.lead(PoolMetadata(facts=stored.facts, hold_blocks=30))
        yield made
    finally:
        made.close()
        stored.close()


def test_a_reset_of_the_connector_holds_until_a_version_is_named(half):
    pool = half._leader.shared.pool
    assert ask(half, "a") == HIT
    half.reset()
    assert ask(half, "b") == 0
    pool.name_weights("2")
    assert ask(half, "c") == 0
    half.reset()
    pool.name_weights("")
    assert ask(half, "d") == HIT


def test_what_was_held_of_the_weights_before_is_not_promised(half):
    """A client names other weights while the ranks copy, and again once they hold it."""
    request, pool = asked("a"), half._leader.shared.pool
    assert half.ask(request, 0) is None
    pool.name_weights("2")
    hold(half)
    assert half.ask(request, 0) == 0
    pool.name_weights("")
    assert half.ask(asked("b"), 0) is None
    hold(half)
    pool.name_weights("3")
    assert half.ask(asked("b"), 0) == 0
