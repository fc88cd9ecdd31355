"""An SDK for a test, which keeps the spans in memory."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvray.trace import spans

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Spans(SpanProcessor):
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.provider.add_span_processor(self)
        self.num_open = 0

    def on_start(self, span: object, parent_context: object = None) -> None:
        self.num_open += 1

    def on_end(self, span: object) -> None:
        self.num_open -= 1

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self._exporter.get_finished_spans() if one.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def names(self) -> list[str]:
        return sorted(one.name for one in self._exporter.get_finished_spans())


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Spans of this process for the time of a test; none of them stays open."""
    made = Spans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made.provider)
    monkeypatch.setattr(spans, "_TRACER", made.provider.get_tracer("kvray"))
    yield made
    assert made.num_open == 0


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"
