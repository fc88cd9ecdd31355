"""Replicas on two nodes: what one has computed is brought to the other, and promised there."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.reference.replica import Replica
from tests.ray.cluster import CONNECTOR, SETTINGS, TwoNodes, open_two_nodes, wait_for

pytestmark = pytest.mark.ray

TOKENS_PER_BLOCK = 32
PROMPT_TOKENS = 640
WHOLE_BLOCKS = 19
"""That an engine loads of a prompt of 640 tokens: it computes at least one itself."""
PATIENT = {**SETTINGS, "connector": {**SETTINGS["connector"], "stage_wait_s": 5.0}}


class Sharing:
    """Two replicas on two nodes of a tier."""

    def __init__(self, nodes: TwoNodes, replicas: list[Replica]) -> None:
        self.nodes = nodes
        self.first, self.second = replicas

    def status(self) -> dict[str, Any]:
        done = self.nodes.machine.run("status", "--json", "-c", str(self.nodes.config_path))
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def num_known(self) -> int:
        return int(self.status()["lookup"]["keys"])

    def compute(self, prompt: list[int]) -> tuple[int, ...]:
        """Have the first replica answer, and wait until the lookup knows of its blocks."""
        before = self.num_known()
        (output,) = self.first.generate([prompt], max_tokens=4)
        blocks = len(prompt) // TOKENS_PER_BLOCK
        wait_for(lambda: self.num_known() >= before + blocks, "the announcement", timeout_s=20)
        return tuple(output.token_ids)


@pytest.fixture(scope="module", params=["nixl", "no nixl"])
def sharing(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Sharing]:
    """Two replicas on nodes that have NIXL, or that have not."""
    environ = {} if request.param == "nixl" else _without_nixl(tmp_path_factory.mktemp("absent"))
    with open_two_nodes(PATIENT, environ=environ) as nodes:
        replicas = []
        try:
            for number, node in enumerate(nodes.nodes):
                replicas.append(
                    Replica.spawn(
                        f"on-node-{number}",
                        env=nodes.engine_environ(node),
                        model="tiny:11",
                        tokens_per_block=TOKENS_PER_BLOCK,
                        num_blocks=128,
                        connector=CONNECTOR,
                        num_threads=1,
                    )
                )
            for replica in replicas:
                replica.wait_ready()
            made = Sharing(nodes, replicas)
            wait_for(lambda: _are_ready(made.status()), "movers and replicas", timeout_s=60)
            yield made
        finally:
            for replica in replicas:
                replica.kill()


def _without_nixl(directory: Path) -> dict[str, str]:
    """Return variables of a node that has no NIXL: what is found first cannot be imported."""
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (directory / f"{name}.py").write_text('raise ImportError("not on this node")\n')
    return {"PYTHONPATH": str(directory)}


def _are_ready(status: dict[str, Any]) -> bool:
    replicas = [rank for shard in status["shards"] for rank in shard.get("replicas", [])]
    return [mover["state"] for mover in status["movers"]] == ["serving"] * 2 and len(replicas) == 2


def has_nixl(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["sharing"] == "nixl")


def make_prompt(name: str) -> list[int]:
    random_ = random.Random(name)
    return [random_.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


def test_a_prompt_computed_on_one_node_is_a_hit_on_the_other(sharing: Sharing) -> None:
    prompt = make_prompt("shared")
    expected = sharing.compute(prompt)

    (output,) = sharing.second.generate([prompt], max_tokens=4)

    assert tuple(output.token_ids) == expected
    assert output.hit_tokens == WHOLE_BLOCKS * TOKENS_PER_BLOCK


def test_a_prefetched_prompt_is_there_when_the_engine_asks(
    sharing: Sharing, tmp_path: Path
) -> None:
    prompt = make_prompt("prefetched")
    expected = sharing.compute(prompt)
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(prompt))
    name = next(
        rank["replica"]
        for shard in sharing.status()["shards"]
        for rank in shard["replicas"]
        if rank["replica"].endswith(f"-{sharing.second.pid}")
    )

    command = ["prefetch", str(tokens), "--replica", name, "--json"]
    done = sharing.nodes.machine.run(*command, "-c", str(sharing.nodes.config_path))

    assert done.returncode == 0, done.stderr
    brought = {"num_tokens": 640, "staged_tokens": 640, "reason": "none"}
    assert json.loads(done.stdout) == brought
    (output,) = sharing.second.generate([prompt], max_tokens=4)
    assert tuple(output.token_ids) == expected
    assert output.hit_tokens == WHOLE_BLOCKS * TOKENS_PER_BLOCK


def test_status_counts_what_came_over_the_wire_and_by_what(
    sharing: Sharing, request: pytest.FixtureRequest
) -> None:
    sharing.second.generate([(prompt := make_prompt("counted"))], max_tokens=1)
    before = _bytes_fetched(sharing.status())
    sharing.compute(other := make_prompt("counted too"))
    sharing.second.generate([other], max_tokens=1)

    status = sharing.status()

    (size,) = {use["block_bytes"] for shard in status["shards"] for use in shard["arena"]["slabs"]}
    assert _bytes_fetched(status) - before == WHOLE_BLOCKS * size
    assert len(prompt) == PROMPT_TOKENS
    used = {name for shard in status["shards"] for name in shard["staging"]["transports"]}
    assert used == {"nixl" if has_nixl(request) else "object_ref"}


def test_doctor_says_which_transport_is_used_and_why(
    sharing: Sharing, request: pytest.FixtureRequest
) -> None:
    done = sharing.nodes.machine.run("doctor", "--json", "-c", str(sharing.nodes.config_path))

    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)["transports"]
    assert len(ways) == 2
    for way in ways:
        if has_nixl(request):
            assert way["transport"] == "nixl"
        else:
            assert way["transport"] == "object_ref"
            assert f"{way['source']} has no nixl: NIXL is not installed" in way["why"]


def _bytes_fetched(status: dict[str, Any]) -> int:
    return sum(mover["bytes_fetched"] for mover in status["movers"])
