"""Engines of one deployment on two nodes: blocks are brought before an engine asks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvray.lab.chaos.machine import RESOURCE
from kvray.reference.tokenizer import ByteTokenizer
from kvray.serve.text import Prompts
from tests.ray.cluster import SETTINGS, open_two_nodes
from tests.ray.served import (
    QUESTION,
    ask,
    engines_of,
    name_of,
    open_client,
    serve_run,
    write_settings,
)
from tests.ray.teller import Teller
from tests.waiting import wait_for

pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray, pytest.mark.long]

BLOCK = 32
LONG_TOKENS = 3000
# Engines never have blocks fetched themselves: what one finds there was brought for it.
FOR_ROUTERS = {**SETTINGS, "connector": {**SETTINGS["connector"], "stage_wait_s": 0.0}}
ONE_A_NODE = {
    "max_replicas_per_node": 1,
    "ray_actor_options": {"num_cpus": 0, "resources": {RESOURCE: 0.1}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoEngines:
    """An endpoint whose engines are on two nodes, one request at a time each."""

    client: Any
    teller: Teller

    def shard_of(self, replica: str) -> dict[str, Any]:
        """Return what the shard says with which an engine is registered."""
        (found,) = [
            shard
            for shard in self.teller.status()["shards"]
            if replica in [one["replica"] for one in shard["replicas"]]
        ]
        return dict(found)

    def num_known(self) -> int:
        """Return how many blocks the lookup knows."""
        return int(self.teller.status()["lookup"]["keys"])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(open_two_nodes(FOR_ROUTERS))
        config = str(nodes.config_path)
        environ = {**nodes.machine.environ(), "KVRAY_CONFIG": config}
        settings: Path = tmp_path_factory.mktemp("two") / "serve.yaml"
        port = write_settings(
            settings, engine=ONE_A_NODE, kvray_config=config, requests_max=1, prefetch_timeout_s=5.0
        )
        stack.enter_context(serve_run(settings, port, environ))
        client = stack.enter_context(open_client(port))
        teller = Teller(nodes.config_path, environ)
        stack.callback(teller.close)
        wait_for(lambda: _are_ready(teller.status()), "movers and engines")
        assert len({*map(name_of, engines_of(config))}) == 2
        yield TwoEngines(client=client, teller=teller)


def _are_ready(status: dict[str, Any]) -> bool:
    replicas = [len(shard.get("replicas", [])) for shard in status["shards"]]
    return [mover["state"] for mover in status["movers"]] == ["serving"] * 2 and replicas == [1, 1]


def test_what_the_engine_of_one_node_computed_is_brought_for_that_of_the_other(
    engines: TwoEngines,
) -> None:
    num_blocks = len(Prompts(ByteTokenizer(), None).encode_chat(QUESTION)) // BLOCK
    known = engines.num_known()
    with ask(engines.client, max_tokens=LONG_TOKENS, stream=True) as stream:
        next(iter(stream))
        first = stream.response.headers["x-kvray-replica"]
        wait_for(lambda: engines.num_known() >= known + num_blocks, "the announcement")
        other = next(name for name in _names(engines) if name != first)
        before = engines.shard_of(other)["staging"]["staged_blocks"]
        raw = ask(engines.client.with_raw_response)
    assert raw.headers["x-kvray-replica"] == other, "the first engine was busy"
    usage = raw.parse().usage
    shareable = (usage.prompt_tokens - 1) // BLOCK * BLOCK
    by_source = {"pool": 0, "host": 0, "disk": 0, "remote": shareable}
    assert usage.prompt_tokens_details.cached_tokens == shareable > 0
    assert usage.prompt_tokens_details.cached_tokens_by_source == by_source
    staging = engines.shard_of(other)["staging"]
    assert staging["staged_blocks"] - before == num_blocks


def _names(engines: TwoEngines) -> list[str]:
    shards = engines.teller.status()["shards"]
    return [one["replica"] for shard in shards for one in shard["replicas"]]
