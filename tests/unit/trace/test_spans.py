"""Spans: below a request or not at all, ended whatever happens, and sent to a collector."""

import logging
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from kvray.errors import ConfigError, ShardUnavailable
from kvray.trace import spans
from kvray.trace.otlp import export
from tests.collector import open_collector
from tests.forks import run
from tests.unit.tracing import CALLER, TRACE, TRACEPARENT, id_of, parent_of, sdk, trace_of

__all__ = ["sdk"]

ABOUT = {"gen_ai.operation.name": "chat"}


def test_a_request_is_below_its_caller_and_what_it_does_below_the_request(sdk):
    assert spans.is_on()
    with spans.request("ingress", {"traceparent": TRACEPARENT}, ABOUT):
        with spans.span("route", {"kvray.replica": "a"}):
            crossing = spans.traceparent()
    ingress, route = sdk.one("ingress"), sdk.one("route")
    assert (trace_of(ingress), parent_of(ingress)) == (TRACE, CALLER)
    assert (trace_of(route), parent_of(route)) == (TRACE, id_of(ingress))
    assert crossing == f"00-{TRACE}-{id_of(route)}-01"
    with spans.under(crossing), spans.span("lookup"):
        pass
    assert parent_of(sdk.one("lookup")) == id_of(route)


def test_what_no_request_asked_for_and_no_caller_samples_is_in_no_trace(sdk):
    with spans.span("lookup") as made:
        assert not made.is_recording()
    spans.past_span("load", "", 1.0, 2.0, {})
    spans.past_span("load", "nonsense", 1.0, 2.0, {})
    with spans.request("ingress", {"traceparent": f"00-{TRACE}-{CALLER}-00"}, ABOUT):
        with spans.span("route"):
            assert spans.traceparent() == ""
    assert sdk.names() == []
    assert spans.traceparent() == ""


@given(st.text(max_size=80))
def test_a_malformed_traceparent_is_ignored(text):
    with spans.under(text), spans.span("lookup") as made:
        assert made.get_span_context().is_valid == spans.current().get_span_context().is_valid


@pytest.mark.parametrize("header", ["", TRACEPARENT[:-1], f"00-{TRACE}-{'0' * 16}-01"])
def test_with_a_malformed_header_a_trace_begins_here(sdk, header):
    with spans.request("ingress", {"traceparent": header}, ABOUT):
        pass
    assert parent_of(sdk.one("ingress")) == ""


def test_a_span_of_the_callers_trace_that_is_nearer_is_the_parent(sdk):
    headers = {"traceparent": TRACEPARENT}
    with spans.under(TRACEPARENT), spans.span("proxy"):
        with spans.request("ingress", headers, ABOUT):
            pass
    assert parent_of(sdk.one("ingress")) == id_of(sdk.one("proxy"))
    other = f"00-{'1' * 32}-{CALLER}-01"
    with spans.under(other), spans.request("ingress", headers, ABOUT):
        pass
    assert {trace_of(one) for one in sdk.named("ingress")} == {TRACE}


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(ShardUnavailable("The shard a did not answer."), True), (ValueError("secret"), False)],
    ids=["kvray's own", "another, whose words stay here"],
)
def test_a_fault_ends_its_span_and_says_what_it_was(sdk, error, is_told):
    with pytest.raises(type(error)), spans.under(TRACEPARENT), spans.span("prefetch"):
        raise error
    failed = sdk.one("prefetch")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == type(error).__name__
    assert (failed.status.description == str(error)) == is_told
    assert (str(error) in failed.to_json()) == is_told


def test_what_is_over_is_told_with_its_own_times(sdk):
    spans.past_span("load", TRACEPARENT, 5.0, 7.5, {"kvray.blocks": 3}, error="CorruptBlock")
    load = sdk.one("load")
    assert (load.start_time, load.end_time) == (5 * 10**9, 75 * 10**8)
    assert (parent_of(load), load.status.status_code) == (CALLER, StatusCode.ERROR)


def test_a_hook_sets_up_the_sdk_unless_there_is_one(monkeypatch, request):
    called: list[int] = []
    hooks = SimpleNamespace(start=lambda: called.append(1))
    monkeypatch.setitem(sys.modules, "some_hooks", hooks)
    spans.start_sdk(None)
    spans.start_sdk("some_hooks:start")
    assert called == [1]
    request.getfixturevalue("sdk")
    spans.start_sdk("some_hooks:start")
    assert called == [1]


@pytest.mark.parametrize("hook", ["no_such_module:start", "kvray.trace.spans:no_such_name"])
def test_a_hook_that_fails_is_told_and_costs_the_traces_only(hook, caplog):
    with caplog.at_level(logging.ERROR, "kvray"):
        spans.start_sdk(hook)
    assert f"tracing.startup_hook {hook} failed" in caplog.text


EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
CODE = f"""
from kvray.trace import spans
spans.start_sdk("kvray.trace.otlp:export")
headers = {{"traceparent": {TRACEPARENT!r}}}
with spans.request("ingress", headers, {{"gen_ai.operation.name": "chat"}}):
    with spans.span("route"):
        pass
"""


def run_spans(**environ: str) -> None:
    done = run(sys.executable, "-c", CODE, env={**os.environ, **environ}, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", ["", "llm"])
def test_a_collector_gets_what_opentelemetrys_variables_say(service):
    pytest.importorskip(EXPORTER)
    with open_collector() as (collector, url):
        run_spans(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_SERVICE_NAME=service)
    assert sorted(collector.spans[TRACE]) == ["ingress", "route"]
    assert collector.services == {service or "kvray"}


def test_a_collector_that_is_not_there_costs_the_spans_only():
    pytest.importorskip(EXPORTER)
    run_spans(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")


def test_a_missing_exporter_is_said_with_its_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvray\[otlp\]'"):
        export()
