"""Replicas with one rank and with two, on two nodes, answer from what the other has computed."""

import random
import time
from collections.abc import Iterator

import pytest

from kvray.lab.chaos.machine import Machine
from kvray.reference.replica import Replica
from tests.ray.cluster import SETTINGS, open_tier
from tests.ray.sharing import TOKENS_PER_BLOCK, Sharing, begin_replicas
from tests.ray.teller import Teller
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

PROMPT_TOKENS = 640
WHOLE_TOKENS = 19 * TOKENS_PER_BLOCK
HEARD_S = 3.0
"""From engine to shard, lookup and back to an engine: three reports."""
PATIENT = {**SETTINGS, "connector": {**SETTINGS["connector"], "stage_wait_s": 5.0}}


@pytest.fixture(scope="module")
def sharing(machine: Machine) -> Iterator[Sharing]:
    """The first replica has all heads in one rank, the second one head in each of two."""
    with open_tier(machine, "sizes", PATIENT) as nodes:
        replicas: list[Replica] = []
        teller = Teller(nodes.config_path, nodes.machine.environ())
        try:
            for replica in begin_replicas(nodes, sizes=(1, 2), poison=True):
                replicas.append(replica)
            for replica in replicas:
                replica.wait_ready()
            made = Sharing(nodes, replicas, teller)
            wait_for(lambda: _are_ready(made), "movers and ranks")
            yield made
        finally:
            teller.close()
            for replica in replicas:
                replica.kill()


def _are_ready(sharing: Sharing) -> bool:
    status = sharing.status()
    ranks = [rank for shard in status["shards"] for rank in shard.get("replicas", [])]
    return [mover["state"] for mover in status["movers"]] == ["serving"] * 2 and len(ranks) == 3


def make_prompt(name: str) -> list[int]:
    random_ = random.Random(name)
    return [random_.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


def hears_of(sharing: Sharing, at: int) -> None:
    """Have a node's engine hear that there are blocks of the other size: it takes a report.

    From its first pass on its ranks have one name, too.
    """
    other, own = (sharing.second, sharing.first)[at], (sharing.first, sharing.second)[at]
    sharing.compute(make_prompt(f"of {other.name}"), other)
    own.generate([make_prompt("to begin")], max_tokens=1)
    time.sleep(HEARD_S)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["one rank to two", "two ranks to one"])
def test_what_one_size_has_computed_the_other_loads_on_another_node(
    sharing: Sharing, direction: str
) -> None:
    source, target, at = sharing.first, sharing.second, 1
    if direction == "two ranks to one":
        source, target, at = target, source, 0
    hears_of(sharing, at)
    prompt = make_prompt(direction)
    expected = sharing.compute(prompt, source)

    (output,) = target.generate([prompt], max_tokens=4)

    assert output.hit_tokens == WHOLE_TOKENS
    assert tuple(output.token_ids) == expected
    name = target.name
    wait_for(
        lambda: num_resliced(sharing, at, name) == WHOLE_TOKENS,
        "the report of the hit",
    )


def num_resliced(sharing: Sharing, at: int, name: str) -> int:
    shard = sharing.shards()[at]
    ranks = [one for one in shard["replicas"] if one["replica"] == name and one["rank"] == 0]
    return int(ranks[0]["counters"].get("resliced_tokens", 0))
