"""Pins and hot copies on three nodes: what is pinned stays, and is told; what is hot is near."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.chaos.machine import Machine
from kvray.node.shard_socket import ShardSocket
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier, wait_for
from tests.ray.test_drain import arena_of
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.store.small_arena import SLOT, chain, store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TOKENS = list(range(12 * 32 + 7))
MINE = replace(NAMESPACE, part_bytes=SLOT)
KEYS = chain_keys(
    np.array(TOKENS, dtype="<i4"), tokens_per_block=32, seed=request_seed(MINE.digest())
)


@pytest.fixture(scope="module")
def tier() -> Iterator[TwoNodes]:
    """A tier on three nodes of its own, with a replica on the first."""
    with Machine(num_nodes=3) as machine, open_tier(machine, "copies", SETTINGS) as made:
        with contextlib.closing(ShardSocket(made.node_dir(made.nodes[0]))) as engine:
            registration = {"namespace": MINE.to_wire(), "wanted": [[0, None]]}
            engine.call("register", timeout_s=5, replica="r", rank=0, **registration)
            yield made


def test_a_pinned_prompt_stays_on_all_nodes_and_over_restarts(tier: TwoNodes) -> None:
    config, prompt = str(tier.config_path), tier.config_path.with_name("system.json")
    prompt.write_text(json.dumps(TOKENS))

    def kvray(*words: str) -> str:
        done = tier.machine.run(*words, "-c", config)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "not stored yet" in kvray("pin", str(prompt), "--for", "1h", "--owner", "ops")
    first, second, _ = tier.nodes
    for node in (first, second):
        with arena_of(tier, node) as arena:
            store(arena, KEYS)

    def here() -> list[int]:
        (found,) = json.loads(kvray("pin", "--json"))["pins"]
        assert (found["name"], found["owner"], found["num_blocks"]) == ("system", "ops", 12)
        return sorted(found["here"].values())

    wait_for(lambda: here() == [0, 12, 12], "the leases", timeout_s=30)
    assert "12 on" in kvray("pin")
    assert "see `kvray pin`" in kvray("status")
    kvray("clear", "--yes")
    wrong = tier.machine.run("pin", str(prompt), "--for", "1h", "--owner", "you", "-c", config)
    assert (wrong.returncode, "a pin of 'ops'" in wrong.stderr) == (2, True)
    kvray("upgrade", "--all")
    assert here() == [0, 12, 12]
    with arena_of(tier, first) as arena:
        store(arena, chain(12, seed="other"))
    kvray("clear", "--yes")
    with arena_of(tier, first) as arena:
        assert arena.match(KEYS) == 12
        assert arena.match(chain(12, seed="other")) == 0

    kvray("pin", "--remove", "system")
    assert "Nothing is pinned" in kvray("pin")
    kvray("clear", "--yes")
    with arena_of(tier, first) as arena:
        assert arena.match(KEYS) == 0
