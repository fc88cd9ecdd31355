"""kvray.serve.llm: what it registers with ray.serve.llm, of which there are stand-ins."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvray.vllm import CONNECTOR

serve = pytest.importorskip("ray.serve")

_TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Import it; return what is registered."""

    class Backend:
        def __init__(self, config: dict[str, Any]) -> None:
            self.kv_transfer_config = config

    found: dict[str, Any] = {}
    parts = _TRANSFER.split(".")
    for end in range(2, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base: Any = ModuleType(f"{_TRANSFER}.base")
    base.DefaultConnectorBackend = Backend
    monkeypatch.setitem(sys.modules, base.__name__, base)
    factory: Any = ModuleType(f"{_TRANSFER}.factory")
    factory.KVConnectorBackendFactory = SimpleNamespace(
        is_registered=found.__contains__, register_backend=found.__setitem__
    )
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    monkeypatch.delitem(sys.modules, "kvray.serve.llm", raising=False)
    importlib.import_module("kvray.serve.llm")
    yield found
    del sys.modules["kvray.serve.llm"]


def backend_of(registered: dict[str, Any], config: dict[str, Any]) -> Any:
    module, name = registered["KvRayConnector"].split(":")
    return getattr(importlib.import_module(module), name)(config)


def test_a_connectors_name_is_all_that_a_user_writes(registered, monkeypatch):
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r7k2"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: replica)
    config: dict[str, Any] = {"kv_connector": "KvRayConnector"}
    backend_of(registered, config).setup()
    assert config == {**CONNECTOR, "kv_connector_extra_config": {"kvray_replica": "r7k2"}}


def test_what_a_user_writes_stays(registered, monkeypatch):
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r7k2"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: replica)
    extra = {"kvray_replica": "mine", "kvray_config": "/etc/kvray.yaml"}
    config = {**CONNECTOR, "kv_connector_extra_config": dict(extra)}
    backend_of(registered, config).setup()
    assert config == {**CONNECTOR, "kv_connector_extra_config": extra}
