"""A tier without Ray, one version of TensorRT-LLM at a time, and engines that end with a test."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from tests.kit.devices import HostDevice
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import FLAT
from tests.trtllm.version import NAMES, Version, installed
from tests.unit.connector.conftest import environment, running_shard, shard
from tests.waiting import wait_for

__all__ = ["environment", "running_shard", "shard"]

PROMPT = list(range(100, 140))
MakeEngine = Callable[..., Engine]
Stored = Callable[..., LlmRequest]


@pytest.fixture(scope="module", params=NAMES)
def version(request: pytest.FixtureRequest) -> Iterator[Version]:
    """Each version in turn."""
    with installed(request.param) as one:
        yield one


@pytest.fixture(params=["host", "device"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pools copied by the code for either kind of memory."""
    if request.param == "device":
        monkeypatch.setattr("kvray.engine.cache_layout.CacheLayout.is_host", False)
        monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: HostDevice())


@pytest.fixture
def make_engine(
    version: Version, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Make engines. Whatever they did: no row was wrong, nothing failed, no lease is left."""
    engines: list[Engine] = []

    def make(*, waits_for_tier: bool = True, **options: Any) -> Engine:
        shape = options.get("shape", FLAT)
        monkeypatch.setitem(os.environ, "KVRAY_CONNECTOR__MODEL_KEY", shape.name)
        engines.append(Engine(version, **options))
        if waits_for_tier:
            wait_for(lambda: engines[-1].arena is not None, "joining the tier")
        return engines[-1]

    yield make
    lives = all(engine.failure is None for engine in engines)
    try:
        assert [engine.model.corrupt_rows for engine in engines] == [0] * len(engines)
        assert [engine.totals["errors"] for engine in engines] == [0] * len(engines)
        if lives:
            wait_for(lambda: leased(shard) == 0, "the end of every lease")
    finally:
        for engine in engines:
            engine.close()
    wait_for(lambda: leased(shard) == 0, "the end of every lease with its engine")
    for _ in range(3):
        shard.clear(10)  # rounds of its loop, in which it closes the connections that ended


@pytest.fixture
def stored(make_engine: MakeEngine) -> Stored:
    """Have an engine of some kind compute a prompt, and its answer, and end; return the request."""

    def store(
        prompt: list[int] = PROMPT,
        *,
        max_new: int = 9,
        fields: dict[str, Any] | None = None,
        **options: Any,
    ) -> LlmRequest:
        cold = make_engine(**options)
        request = cold.serve(prompt, max_new=max_new, **(fields or {}))
        cold.close()
        return request

    return store


@pytest.fixture
def make_warm(make_engine: MakeEngine, stored: Stored) -> MakeEngine:
    """Make engines whose tier has PROMPT, of another engine of the kind."""

    def make(**options: Any) -> Engine:
        stored(**options)
        return make_engine(**options)

    return make


def leased(shard: Shard) -> int:
    """Return how many blocks are leased."""
    return int(shard.status()["arena"]["leased_blocks"])
