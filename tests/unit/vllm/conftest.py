"""The shard of the connector's tests, engines of no make, and the scheduler's half without vLLM."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kvray.config import load_config
from kvray.engine.shared_state import shared_state_for
from tests.kit.apart import ARGS, Apart
from tests.kit.connector import stand_in
from tests.unit.engine.conftest import environment, make_engine, running_shard, shard, stored

if TYPE_CHECKING:
    from kvray.vllm.scheduling import SchedulingHalf

__all__ = ["environment", "make_engine", "running_shard", "shard", "stored"]

ROOM = 30
VLLM = replace(ARGS, holds_loads=True, takes_offers_later=True)
MakeHalf = Callable[..., "SchedulingHalf"]


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


@pytest.fixture
def make_half(stored: Apart, scheduling: ModuleType) -> Iterator[MakeHalf]:
    """Make scheduler's halves beside an engine that has stored the prompt."""
    halves: list[SchedulingHalf] = []

    def make(**options: Any) -> "SchedulingHalf":
        from kvray.vllm.start import PoolMetadata

        shared = shared_state_for(object(), VLLM, load_config(None))
        halves.append(scheduling.SchedulingHalf(shared, **options))
        halves[-1].lead({0: PoolMetadata(identity=stored.identity, hold_blocks=ROOM)})
        return halves[-1]

    yield make
    for half in halves:
        half.close()
