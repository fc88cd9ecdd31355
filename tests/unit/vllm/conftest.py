"""The shard of the connector's tests, engines of no make, and the scheduler's half without vLLM."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.kit.connector import stand_in
from tests.unit.engine.conftest import environment, make_engine, running_shard, shard, stored

__all__ = ["environment", "make_engine", "running_shard", "shard", "stored"]


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the scheduler's half, which needs of vLLM only the names of three classes."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    parts = name.split(".")
    for end in range(1, len(parts)):
        stand_in(monkeypatch, ".".join(parts[:end]))
    kinds = ("Metadata", "HandshakeMetadata", "WorkerMetadata")
    stand_in(monkeypatch, name, **{f"KVConnector{kind}": object for kind in kinds})
    stand_in(monkeypatch, "vllm.envs")
    before = set(sys.modules)
    yield importlib.import_module("kvray.vllm.scheduling")
    for made in set(sys.modules) - before:
        if made.startswith("kvray.vllm"):
            del sys.modules[made]
