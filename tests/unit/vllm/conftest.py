"""The shard of the connector's tests, engines of no make, and the scheduler's half without vLLM."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.unit.engine.conftest import environment, make_engine, running_shard, shard, stored

__all__ = ["environment", "make_engine", "running_shard", "shard", "stored"]


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
    monkeypatch.setitem(sys.modules, "vllm.envs", ModuleType("vllm.envs"))
    before = set(sys.modules)
    yield importlib.import_module("kvray.vllm.scheduling")
    for made in set(sys.modules) - before:
        if made.startswith("kvray.vllm"):
            del sys.modules[made]
