"""Two nodes with disks: what one has flushed is a hit on the other, after a new start."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvray.lab.chaos.machine import Machine
from kvray.reference.replica import Replica
from tests.ray.cluster import CONNECTOR, SETTINGS, TwoNodes, open_tier
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

TOKENS_PER_BLOCK = 32
PROMPT = [random.Random("disk").randrange(3, 250) for _ in range(640)]
WHOLE_TOKENS = 608
"""That an engine loads of a prompt of 640 tokens: it computes at least one itself."""
WITH_DISK = {
    **SETTINGS,
    "connector": {**SETTINGS["connector"], "stage_wait_s": 5.0},
    "nvme": {"capacity": "256MiB", "segment": "16MiB", "free_reserve": "1MiB"},
}


def run(nodes: TwoNodes, command: str, *args: str) -> str:
    done = nodes.machine.run(command, *args, "-c", str(nodes.config_path))
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def shards(nodes: TwoNodes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(nodes, "status", "--json"))["shards"]
    return found


def start(nodes: TwoNodes, number: int) -> Replica:
    return Replica.start(
        f"on-node-{number}",
        env=nodes.engine_environ(nodes.nodes[number]),
        model="tiny:11",
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=128,
        connector=CONNECTOR,
        num_threads=1,
    )


def num_on_disk(nodes: TwoNodes) -> list[int]:
    return sorted(shard["nvme"]["blocks"] for shard in shards(nodes))


@pytest.mark.long
def test_a_prompt_that_one_node_has_flushed_is_a_hit_on_the_other(machine: Machine) -> None:
    with open_tier(machine, "disks", WITH_DISK) as nodes:
        first = start(nodes, 0)
        try:
            (expected,) = first.generate([PROMPT], max_tokens=4)
            wait_for(
                lambda: sum(shard["arena"]["blocks"] for shard in shards(nodes)) >= 20,
                "saving",
            )
        finally:
            first.kill()
        run(nodes, "down")
        run(nodes, "up")
        assert num_on_disk(nodes) == [0, 20]
        second = start(nodes, 1)
        try:
            wait_for(lambda: _knows(nodes), "the announcement")
            (output,) = second.generate([PROMPT], max_tokens=4)
            # While it lives: it reports once a second, and not when it is killed.
            (request,) = json.loads(run(nodes, "explain", "--last", "--json"))["requests"]
        finally:
            second.kill()
        assert output.token_ids == expected.token_ids
        assert output.hit_tokens == WHOLE_TOKENS
        found = {Path(shard["directory"]): shard for shard in shards(nodes)}
        flushed, asked = (found[nodes.node_dir(node)] for node in nodes.nodes)
        assert (flushed["nvme"]["promoted_blocks"], asked["nvme"]["promoted_blocks"]) == (19, 0)
        assert request["node"] == asked["shard"]
        hit = request["ranges"][0]
        assert (hit["start"], hit["stop"], hit["what"]) == (0, WHOLE_TOKENS, "hit")
        assert hit["source"] == flushed["shard"]
        assert hit["way"] in ("nixl", "object_ref"), "not from a disk of its own"
        (rank,) = asked["replicas"]
        assert rank["counters"][f"hit_tokens_from_{hit['way']}"] == WHOLE_TOKENS


def _knows(nodes: TwoNodes) -> bool:
    """Whether the lookup knows the blocks, and the movers can fetch."""
    status = json.loads(run(nodes, "status", "--json"))
    movers = [mover["state"] for mover in status["movers"]]
    return bool(status["lookup"]["keys"] >= 20 and movers == ["serving"] * 2)
