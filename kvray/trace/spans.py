"""Spans of OpenTelemetry, by its API alone: without an SDK they cost next to nothing.

A span is made only below another one. The first of a trace is the endpoint's, so what no request
asked for, and what a sampler left out, is in no trace. Attributes hold names, sizes and times: no
token, and no text of a prompt.
"""

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvray import __version__
from kvray.errors import KVRayError

_log = logging.getLogger("kvray")

Attributes: TypeAlias = Mapping[str, str | bool | int | float]

_TRACER = trace.get_tracer(
    "kvray", __version__
)  # asks for the SDK at its first use, and again until then
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_HEADER = "traceparent"
_MESSAGE_MAX = 200


def is_on() -> bool:
    """Return whether this process has an SDK, which spans go to."""
    no_sdk = trace.ProxyTracerProvider, trace.NoOpTracerProvider
    return not isinstance(trace.get_tracer_provider(), no_sdk)


def start_sdk(hook: str | None) -> None:
    """Call the function `module:name` that sets up the SDK, unless there is a hook or an SDK.

    One that fails is logged: what is traced works without it.
    """
    if hook is None or is_on():
        return
    module, _, name = hook.partition(":")
    try:
        getattr(importlib.import_module(module), name)()
    except Exception:  # noqa: BLE001 - whatever somebody's function raises, see above
        _log.exception("kvray: there are no traces: tracing.startup_hook %s failed", hook)


@contextmanager
def request(name: str, headers: Mapping[str, str], attributes: Attributes) -> Iterator[Span]:
    """Make the first span of a request, below that of its caller, if its headers name one.

    If both belong to one trace, the current span, of Serve or a middleware, is the closer parent.
    """
    parent = propagate.extract(headers)
    caller = trace.get_current_span(parent).get_span_context()
    here = trace.get_current_span().get_span_context()
    if not caller.is_valid or caller.trace_id == here.trace_id:
        parent = context.get_current()
    with _current(_TRACER.start_span(name, parent, SpanKind.SERVER, attributes)) as made:
        yield made


@contextmanager
def span(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """Make a span below the current one; without one it is a span that goes nowhere."""
    if not _is_below():
        yield trace.INVALID_SPAN
        return
    with _current(_TRACER.start_span(name, attributes=attributes)) as made:
        yield made


def past_span(
    name: str, parent: str, began: float, ended: float, attributes: Attributes, *, error: str = ""
) -> None:
    """Make a span of what is over, below the span that `parent` names; times are of the epoch.

    An empty `parent` is the current span; where there is none, nothing is made.
    """
    with under(parent):
        if not _is_below():
            return
        made = _TRACER.start_span(name, attributes=attributes, start_time=int(began * 1e9))
    if error:
        made.set_attribute("error.type", error)
        made.set_status(StatusCode.ERROR)
    made.end(int(max(began, ended) * 1e9))


@contextmanager
def under(traceparent: str) -> Iterator[None]:
    """Make what is made in this block below the span that `traceparent` names.

    A malformed or empty one changes nothing.
    """
    found = _TRACE_CONTEXT.extract({_HEADER: traceparent}) if traceparent else Context()
    if not found:
        yield
        return
    token = context.attach(found)
    try:
        yield
    finally:
        context.detach(token)


def traceparent() -> str:
    """Return the name of the current span for another process; empty if there is nothing to add."""
    if not trace.get_current_span().get_span_context().trace_flags.sampled:
        return ""
    carrier: dict[str, str] = {}
    _TRACE_CONTEXT.inject(carrier)
    return carrier.get(_HEADER, "")


def current() -> Span:
    """Return the current span; one that goes nowhere if there is none."""
    return trace.get_current_span()


def fail(failed: Span, error: BaseException | str) -> None:
    """Say of a span what ended it early; errors of others are named only, they may quote a text."""
    if isinstance(error, str):
        kind, said = error, ""
    else:
        kind, said = type(error).__name__, str(error) if isinstance(error, KVRayError) else ""
    failed.set_attribute("error.type", kind)
    failed.set_status(StatusCode.ERROR, said[:_MESSAGE_MAX] or None)


def _is_below() -> bool:
    return trace.get_current_span().get_span_context().is_valid


@contextmanager
def _current(made: Span) -> Iterator[Span]:
    with trace.use_span(
        made, end_on_exit=True, record_exception=False, set_status_on_exception=False
    ):
        try:
            yield made
        except BaseException as error:
            fail(made, error)
            raise
