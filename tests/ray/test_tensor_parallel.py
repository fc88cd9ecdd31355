"""Engines of several ranks, of other sizes and spread over nodes: promise, load and loss."""

import contextlib
import functools
import itertools
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from kvray.errors import KVRayError
from kvray.lab.chaos.machine import Machine
from kvray.reference.engine import ReferenceEngine
from kvray.reference.output import Output
from kvray.reference.replica import Replica
from kvray.store import Arena
from kvray.store.arena.layout import LIMBO, RESERVED
from tests.kit.ray.cluster import (
    NUM_BLOCKS,
    PATIENT,
    REPLICA,
    SETTINGS,
    TOKENS_PER_BLOCK,
    WHOLE_TOKENS,
    Sharing,
    TwoNodes,
    open_sharing,
    open_tier,
    prompt_of,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

HEARD_S = 3.0
"""From engine to shard, lookup and back to an engine: three reports."""


@pytest.fixture(scope="module")
def sizes(machine: Machine) -> Iterator[Sharing]:
    """The first replica has all heads in one rank, the second one head in each of two."""
    with (
        open_tier(machine, "sizes", PATIENT) as nodes,
        open_sharing(nodes, sizes=(1, 2), poison=True) as made,
    ):
        yield made


def hears_of(sizes: Sharing, at: int) -> None:
    """Have a node's engine hear that there are blocks of the other size: it takes a report.

    From its first pass on its ranks have one name, too.
    """
    other, own = (sizes.second, sizes.first)[at], (sizes.first, sizes.second)[at]
    sizes.compute(prompt_of(f"of {other.name}"), other)
    own.generate([prompt_of("to begin")], max_tokens=1)
    time.sleep(HEARD_S)


@pytest.mark.parametrize("direction", ["one rank to two", "two ranks to one"])
def test_what_one_size_has_computed_the_other_loads_on_another_node(sizes, direction):
    source, target, at = sizes.first, sizes.second, 1
    if direction == "two ranks to one":
        source, target, at = target, source, 0
    hears_of(sizes, at)
    prompt = prompt_of(direction)
    expected = sizes.compute(prompt, source)

    (output,) = target.generate([prompt], max_tokens=4)

    assert output.hit_tokens == WHOLE_TOKENS
    assert tuple(output.token_ids) == expected
    name = target.name
    wait_for(
        lambda: num_resliced(sizes, at, name) == WHOLE_TOKENS,
        "the report of the hit",
    )


def num_resliced(sizes: Sharing, at: int, name: str) -> int:
    shard = sizes.shards()[at]
    ranks = [one for one in shard["replicas"] if one["replica"] == name and one["rank"] == 0]
    return int(ranks[0]["counters"].get("resliced_tokens", 0))


POOL_BLOCKS = 64
"""Of an engine: not enough for the prompts of a test, so that it asks for each one again."""
HASTY = {
    **PATIENT,
    "arena": {**SETTINGS["arena"], "limbo_s": 2.0},
    "staging": {"handover_s": 0.5},
}


class Spread:
    """A tier on two nodes, engines across both, and the answers of one that has no cache."""

    def __init__(self, nodes: TwoNodes) -> None:
        self.nodes = nodes
        self.replicas: list[Replica] = []
        self._prompts = itertools.count()
        self._oracle = ReferenceEngine(
            REPLICA["model"],
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=POOL_BLOCKS,
            enable_block_reuse=False,
            num_threads=1,
        )

    def start(self, name: str, *, leader: int) -> Replica:
        """Begin to start an engine with rank 0 on node `leader` and rank 1 on the other."""
        first, second = self.nodes.nodes[leader], self.nodes.nodes[1 - leader]
        environ = {**self.nodes.engine_environ(first), "KVRAY_CONNECTOR__REPLICA": name}
        options = {
            **REPLICA,
            "num_blocks": POOL_BLOCKS,
            "poison": True,
            "tensor_parallel_size": 2,
            "ranks_per_node": 1,
            "rank_env": [{"KVRAY_ARENA__DIR": str(second.arena_dir)}],
        }
        self.replicas.append(Replica(name, env=environ, **options))
        return self.replicas[-1]

    def wait_ready(self, *replicas: Replica) -> None:
        """Return once both ranks of each are known by the name of their replica."""
        for replica in replicas:
            replica.wait_ready()
            self.ask(replica, self.make_prompt())  # from the first pass on all ranks have one name
        expected = {(one.name, rank) for one in replicas for rank in (0, 1)}
        wait_for(lambda: expected <= self.ranks(), "the registration of all ranks")

    def ask(self, replica: Replica, prompt: list[int]) -> Output:
        """Return an answer, which must be the one of an engine without a cache."""
        (output,) = replica.generate([prompt], max_tokens=4, timeout_s=60.0)
        assert output.token_ids == self._oracle.generate(prompt, max_tokens=4).token_ids
        return output  # type: ignore[no-any-return]

    def compute(self, replica: Replica, num_prompts: int) -> list[list[int]]:
        """Have an engine answer new prompts, and return them once the tier has all of them."""
        before = self.nodes.status()["lookup"]["keys"]
        prompts = [self.make_prompt() for _ in range(num_prompts)]
        for prompt in prompts:
            self.ask(replica, prompt)
        wanted = before + num_prompts * NUM_BLOCKS
        wait_for(lambda: self.nodes.status()["lookup"]["keys"] >= wanted, "the announcement")
        return prompts

    def make_prompt(self) -> list[int]:
        """Return one that nobody had before."""
        return prompt_of(next(self._prompts))

    def ranks(self) -> set[tuple[str, int]]:
        """Return (replica, rank) of all that are connected to a shard."""
        return {
            (rank["replica"], rank["rank"])
            for shard in self.nodes.status()["shards"]
            for rank in shard.get("replicas", [])
            if rank["connected"]
        }

    def num_staged(self) -> list[int]:
        """Return how many blocks each node had brought."""
        return [shard["staging"]["staged_blocks"] for shard in self.nodes.status()["shards"]]

    def held(self) -> list[int]:
        """Return how many slots of each node are leased, reserved or wait for a late copy."""
        found = []
        for node in self.nodes.nodes:
            tables = Arena(self.nodes.node_dir(node), lock_wait_s=1.0).tables
            is_unwritten = np.isin(tables.slot_state, (RESERVED, LIMBO))
            found.append(int(((tables.slot_leases > 0) | is_unwritten).sum()))
        return found

    def wait_released(self) -> None:
        wait_for(lambda: self.held() == [0, 0], "the end of every lease")

    def close(self) -> None:
        for replica in self.replicas:
            replica.kill()
        self._oracle.close()


@contextlib.contextmanager
def open_spread(machine: Machine) -> Iterator[Spread]:
    """Have two engines, whose ranks are placed the one way round and the other."""
    with (
        open_tier(machine, "spread", HASTY) as nodes,
        contextlib.closing(Spread(nodes)) as made,
    ):
        made.wait_ready(made.start("forth", leader=0), made.start("back", leader=1))
        yield made


@pytest.fixture(scope="module")
def spread(machine: Machine) -> Iterator[Spread]:
    with open_spread(machine) as made:
        yield made


def test_an_engine_ends_with_any_rank_and_its_successor_has_what_it_stored(spread):
    (prompt,) = spread.compute(spread.replicas[0], 1)
    with spread.start("doomed", leader=0) as doomed:
        spread.wait_ready(doomed)
        assert spread.ask(doomed, prompt).hit_tokens == WHOLE_TOKENS
        (rank,) = psutil.Process(doomed.pid).children()

        rank.send_signal(signal.SIGKILL)

        with pytest.raises(KVRayError, match="was killed by SIGKILL"):
            spread.ask(doomed, spread.make_prompt())
    spread.wait_released()
    with spread.start("successor", leader=0) as successor:
        spread.wait_ready(successor)
        assert spread.ask(successor, prompt).hit_tokens == WHOLE_TOKENS


def test_the_loss_of_either_node_is_a_miss_and_its_return_brings_the_hits_back():
    """Both engines lose their leader's node and that of their other rank, and go on."""
    with Machine() as machine, open_spread(machine) as spread:
        forth, back = spread.replicas[:2]
        for node in spread.nodes.nodes:
            prompts = spread.compute(forth, 8)
            before = spread.num_staged()
            assert spread.ask(back, prompts[0]).hit_tokens == WHOLE_TOKENS
            staged = [now - then for now, then in zip(spread.num_staged(), before, strict=True)]
            assert staged == [NUM_BLOCKS - 1] * 2, "part by part"

            node.kill()

            for replica in (forth, back):
                for prompt in prompts[1:4]:
                    assert spread.ask(replica, prompt).hit_tokens == 0
            node.start()
            # Ray prints that the node has died, which must not get into what status prints.
            wait_for(lambda: len(spread.ranks()) == 4, "the return of the ranks")
            for replica in (forth, back):
                wait_for(functools.partial(is_hit, spread, replica, prompts), "a hit")
            spread.wait_released()


def is_hit(spread: Spread, replica: Replica, prompts: list[list[int]]) -> bool:
    """Return whether one of `prompts`, a different one each time, is all there for an engine."""
    prompts.append(prompts.pop(0))
    return spread.ask(replica, prompts[-1]).hit_tokens == WHOLE_TOKENS
