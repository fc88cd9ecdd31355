"""A call of an actor takes the trace along where the actor knows what to do with it."""

from types import SimpleNamespace
from typing import Any

from kvray.actors.ray_glue.calls import traced
from kvray.trace.spans import traceparent, under
from tests.unit.tracing import TRACEPARENT, Spans, sdk

__all__ = ["sdk"]


def method(name: str) -> Any:
    return SimpleNamespace(remote=lambda *args: (name, *args))


NEW = SimpleNamespace(promote=method("promote"), traced_promote=method("traced_promote"))
OLD = SimpleNamespace(promote=method("promote"))


def test_a_method_with_a_traced_one_beside_it_gets_the_trace_first(sdk: Spans) -> None:
    with under(TRACEPARENT):
        assert traced(NEW, "promote")(1) == ("traced_promote", traceparent(), 1)


def test_an_actor_of_an_older_version_is_called_as_ever(sdk: Spans) -> None:
    with under(TRACEPARENT):
        assert traced(OLD, "promote")(1) == ("promote", 1)


def test_without_a_trace_nothing_is_taken_along(sdk: Spans) -> None:
    assert traced(NEW, "promote")(1) == ("promote", 1)
