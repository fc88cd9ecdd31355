"""vLLM's word that its cache is to be forgotten takes it off the tier until a version is named."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine.shared_state import SharedState
from tests.unit.connector.conftest import environment, running_shard, server, shard
from tests.unit.engine.conftest import MakeEngine, make_engine

__all__ = ["environment", "make_engine", "running_shard", "server", "shard"]

PROMPT = list(range(100, 140))


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the scheduler's half, which needs of vLLM only the names of two classes."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    base: Any = ModuleType(name)
    base.KVConnectorMetadata = base.KVConnectorHandshakeMetadata = object
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


def ask(half: Any, name: str) -> int | None:
    request: Any = SimpleNamespace(
        request_id=name,
        all_token_ids=PROMPT,
        prompt_token_ids=PROMPT,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        mm_features=[],
        resumable=False,
        pooling_params=None,
        lora_request=None,
        cache_salt=None,
    )
    hit: int | None = half.ask(request, 0)
    half.allocated(request, 0)
    half.finish(name)
    return hit


def test_a_reset_of_the_connector_holds_until_a_version_is_named(
    shard: Shard, make_engine: MakeEngine, scheduling: Any
) -> None:
    engine = make_engine()
    engine.serve(PROMPT)
    shared: SharedState = engine.leader.shared
    half = scheduling.SchedulingHalf(shared)
    assert ask(half, "a") == 36
    half.reset()
    assert ask(half, "b") == 0
    shared.pool.name_weights("2")
    assert ask(half, "c") == 0
    half.reset()
    shared.pool.name_weights("")
    assert ask(half, "d") == 36
