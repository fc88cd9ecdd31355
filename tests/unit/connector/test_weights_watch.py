"""A connector notices that the engine's weights are replaced, which no version tells it."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvray.connector.start import REPLACING, watch_weights


class Engine:
    """Counts how often it was told."""

    def __init__(self) -> None:
        self.versions: list[str | None] = []
        self.pool = SimpleNamespace(name_weights=self.versions.append)


@pytest.fixture(params=REPLACING, ids=lambda one: one[2])
def replacing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return one of TensorRT-LLM's classes, as far as it concerns weights, and the method."""
    module_name, owner, method = request.param

    def called(self: object, *args: object, **options: object) -> tuple[object, ...]:
        return (*args, *options.values())

    module = ModuleType(module_name)
    found = type(owner, (), {method: called})
    setattr(module, owner, found)
    monkeypatch.setitem(sys.modules, module_name, module)
    return found, method


def test_every_engine_of_the_process_leaves_the_tier(replacing: Any) -> None:
    found, method = replacing
    engines: list[Any] = [Engine(), Engine()]
    for engine in (*engines, engines[0]):
        watch_weights(engine)
    assert getattr(found(), method)(1, two=2) == (1, 2)
    assert [one.versions for one in engines] == [[None], [None]]


def test_an_engine_that_is_gone_is_not_kept(replacing: Any) -> None:
    found, method = replacing
    engine: Any = Engine()
    versions = engine.versions
    watch_weights(engine)
    del engine
    getattr(found(), method)()
    assert versions == []


def test_without_these_methods_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, owner, _ in REPLACING:
        made = ModuleType(module)
        setattr(made, owner, type(owner, (), {}))
        monkeypatch.setitem(sys.modules, module, made)
    engine: Any = Engine()
    watch_weights(engine)
