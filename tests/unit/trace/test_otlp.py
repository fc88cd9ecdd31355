"""Spans on their way to a collector."""

import os
import subprocess
import sys

import pytest

from kvray.errors import ConfigError
from kvray.trace.otlp import export
from tests.collector import open_collector
from tests.unit.tracing import TRACE, TRACEPARENT

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
CODE = f"""
from kvray.trace import spans
spans.start_sdk("kvray.trace.otlp:export")
headers = {{"traceparent": {TRACEPARENT!r}}}
with spans.request("ingress", headers, {{"gen_ai.operation.name": "chat"}}):
    with spans.span("route"):
        pass
"""


def run(**environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize("service", ["", "llm"])
def test_a_collector_gets_what_opentelemetrys_variables_say(service: str) -> None:
    pytest.importorskip(EXPORTER)
    with open_collector() as (collector, url):
        run(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_SERVICE_NAME=service)
    assert sorted(collector.spans[TRACE]) == ["ingress", "route"]
    assert collector.services == {service or "kvray"}


def test_a_collector_that_is_not_there_costs_the_spans_only() -> None:
    pytest.importorskip(EXPORTER)
    run(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")


def test_a_missing_exporter_is_said_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvray\[otlp\]'"):
        export()
