"""Engines of one deployment on two nodes: blocks are brought before an engine asks, and traced."""

import contextlib
from typing import Any

import pytest

from kvray.lab.chaos.machine import RESOURCE
from kvray.serve.render import load_prompts
from kvray.serve.settings import Settings
from tests.collector import Collector, attributes_of, open_collector
from tests.kit.ray import cluster
from tests.kit.ray.served import (
    QUESTION,
    ask,
    engines_of,
    name_of,
    open_client,
    serve_run,
    write_settings,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

pytest.importorskip("ray.serve")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

BLOCK = 32
LONG_TOKENS = 3000
CALLER = "00f067aa0ba902b7"
# Engines never have blocks fetched themselves: what one finds there was brought for it.
SETTINGS = {
    **cluster.SETTINGS,
    "connector": {**cluster.SETTINGS["connector"], "stage_wait_s": 0.0},
    "tracing": {"startup_hook": "kvray.trace.otlp:export"},
}
ONE_A_NODE = {
    "max_replicas_per_node": 1,
    "ray_actor_options": {"num_cpus": 0, "resources": {RESOURCE: 0.1}},
}


def _are_ready(status: dict[str, Any]) -> bool:
    replicas = [len(shard.get("replicas", [])) for shard in status["shards"]]
    return [mover["state"] for mover in status["movers"]] == ["serving"] * 2 and replicas == [1, 1]


def shards_by_engine(teller: cluster.Teller) -> dict[str, dict[str, Any]]:
    """Return engine -> what the shard says with which it is registered."""
    shards = teller.status()["shards"]
    return {one["replica"]: shard for shard in shards for one in shard["replicas"]}


def test_what_the_engine_of_one_node_computed_is_brought_for_that_of_the_other_and_traced(tmp_path):
    with contextlib.ExitStack() as stack:
        collector, url = stack.enter_context(open_collector())
        otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        nodes = stack.enter_context(cluster.open_two_nodes(SETTINGS, environ=otel))
        config = str(nodes.config_path)
        environ = {**nodes.machine.environ(), "KVRAY_CONFIG": config}
        settings = tmp_path / "serve.yaml"
        # One request at a time each.
        options = {"kvray_config": config, "requests_max": 1, "prefetch_timeout_s": 5.0}
        port = write_settings(settings, deployment=ONE_A_NODE, **options)
        stack.enter_context(serve_run(settings, port, environ))
        client = stack.enter_context(open_client(port))
        teller = stack.enter_context(contextlib.closing(cluster.Teller(nodes.config_path, environ)))
        wait_for(lambda: _are_ready(teller.status()), "movers and engines")
        assert len({*map(name_of, engines_of(config))}) == 2
        check_a_prompt_of_both(client, teller, collector)


def check_a_prompt_of_both(client: Any, teller: cluster.Teller, collector: Collector) -> None:
    """Ask while the engine that has the prompt is busy, so that the other one answers."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    prompts = load_prompts(Settings(model="tiny"), engine="reference")
    num_blocks = len(prompts.chat({"messages": QUESTION})) // BLOCK
    known = teller.status()["lookup"]["keys"]
    with ask(client, max_tokens=LONG_TOKENS, stream=True) as stream:
        next(iter(stream))
        first = stream.response.headers["x-kvray-replica"]
        wait_for(
            lambda: teller.status()["lookup"]["keys"] >= known + num_blocks, "the announcement"
        )
        other, shard = next(one for one in shards_by_engine(teller).items() if one[0] != first)
        headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
        raw = ask(client.with_raw_response, extra_headers=headers)
    assert raw.headers["x-kvray-replica"] == other, "the first engine was busy"
    usage = raw.parse().usage
    shareable = (usage.prompt_tokens - 1) // BLOCK * BLOCK
    by_source = {"pool": 0, "tier": shareable}
    assert usage.prompt_tokens_details.cached_tokens == shareable > 0
    assert usage.prompt_tokens_details.cached_tokens_by_source == by_source
    assert int(raw.headers["x-kvray-cached-tokens"]) >= shareable
    staged = shards_by_engine(teller)[other]["staging"]["staged_blocks"]
    assert staged - shard["staging"]["staged_blocks"] == num_blocks

    check_tree(collector, trace, other, usage)


def check_tree(collector: Collector, trace: str, replica: str, usage: Any) -> None:
    """Check that a request is one tree of spans, from its caller's to the fetch."""
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
    assert {about[name]["kvray.replica"] for name in names if name not in ("lookup", "fetch")} == {
        replica
    }
    assert about["ingress"]["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert about["fetch"]["kvray.tier"] == "host"
    assert about["fetch"]["kvray.transport"] in ("nixl", "object_ref")
    assert about["fetch"]["kvray.source"] != about["fetch"]["kvray.shard"]
    assert about["fetch"]["kvray.bytes"] > 0
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
    assert collector.services == {"kvray"}
    told = str(found)
    assert not any(message["content"] in told for message in QUESTION)
