"""The trace of one request, as a collector gets it: by OTLP, from every process on its way."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from kvray.lab.chaos.machine import RESOURCE
from tests.collector import Collector, attributes_of, open_collector
from tests.ray.cluster import SETTINGS, open_two_nodes
from tests.ray.served import QUESTION, ask, open_client, serve_run, write_settings
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

TRACED = {
    **SETTINGS,
    "connector": {**SETTINGS["connector"], "stage_wait_s": 0.0},
    "tracing": {"startup_hook": "kvray.trace.otlp:export"},
}
ONE_A_NODE = {
    "max_replicas_per_node": 1,
    "ray_actor_options": {"num_cpus": 0, "resources": {RESOURCE: 0.1}},
}
LONG_TOKENS = 3000
CALLER = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Collector]]:
    with contextlib.ExitStack() as stack:
        collector, url = stack.enter_context(open_collector())
        otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        nodes = stack.enter_context(open_two_nodes(TRACED, environ=otel))
        config = str(nodes.config_path)
        environ = {**nodes.machine.environ(), "KVRAY_CONFIG": config}
        settings: Path = tmp_path_factory.mktemp("traced") / "serve.yaml"
        port = write_settings(
            settings, engine=ONE_A_NODE, kvray_config=config, requests_max=1, prefetch_timeout_s=5.0
        )
        stack.enter_context(serve_run(settings, port, environ))
        yield stack.enter_context(open_client(port)), collector


def traceparent(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CALLER}-01"}


def test_a_request_is_one_tree_from_the_callers_span_to_the_fetch(
    traced: tuple[Any, Collector],
) -> None:
    client, collector = traced
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with ask(client, max_tokens=LONG_TOKENS, stream=True) as stream:  # which keeps one engine busy
        next(iter(stream))
        first = stream.response.headers["x-kvray-replica"]
        raw = ask(client.with_raw_response, extra_headers=traceparent(trace))
    usage = raw.parse().usage
    names = ("ingress", "route", "prefetch", "lookup", "fetch")
    found = collector.spans[trace]
    wait_for(lambda: set(names) <= found.keys(), lambda: dict(found))
    spans = {name: found[name][0] for name in names}
    about = {name: attributes_of(span) for name, span in spans.items()}
    assert spans["ingress"].parent_span_id.hex() == CALLER
    for name in ("route", "prefetch"):
        assert spans[name].parent_span_id == spans["ingress"].span_id
    for name in ("lookup", "fetch"):
        assert spans[name].parent_span_id == spans["prefetch"].span_id
    replica = raw.headers["x-kvray-replica"]
    assert replica != first
    assert {about[name]["kvray.replica"] for name in names if name not in ("lookup", "fetch")} == {
        replica
    }
    cached = usage.prompt_tokens_details.cached_tokens
    assert about["ingress"]["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert about["ingress"]["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert about["fetch"]["kvray.tier"] == "host"
    assert about["fetch"]["kvray.transport"] in ("nixl", "object_ref")
    assert about["fetch"]["kvray.source"] != about["fetch"]["kvray.shard"]
    assert about["fetch"]["kvray.bytes"] > 0
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
    assert collector.services == {"kvray"}
    told = str(found)
    assert not any(message["content"] in told for message in QUESTION)
