"""Pins and hot copies on three nodes: what is pinned stays, and is told; what is hot is near."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.chaos.machine import Machine
from kvray.node.shard_socket import ShardSocket
from kvray.store.arena.layout import READY
from tests.ray import hammering
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.ray.test_drain import arena_of
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.store.small_arena import SLOT, chain, store
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray]

TOKENS = list(range(12 * 32 + 7))
MINE = replace(NAMESPACE, part_bytes=SLOT)
KEYS = chain_keys(
    np.array(TOKENS, dtype="<i4"), tokens_per_block=32, seed=request_seed(MINE.digest())
)


@pytest.fixture(scope="module")
def tier() -> Iterator[TwoNodes]:
    """A tier on three nodes of its own, with a replica on the first; no node asks for a warm-up."""
    settings = {**SETTINGS, "warm_up": {"share": 0}}
    with (
        Machine(num_nodes=3) as machine,
        open_tier(machine, "copies", settings, num_nodes=3) as made,
    ):
        with contextlib.closing(ShardSocket(made.node_dir(made.nodes[0]))) as engine:
            registration = {"namespace": MINE.to_wire(), "wanted": [[0, None]]}
            engine.call("register", timeout_s=5, replica="r", rank=0, **registration)
            yield made


@pytest.mark.long
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

    wait_for(lambda: here() == [0, 12, 12], "the leases")
    assert "12 on" in kvray("pin")
    assert "see `kvray pin`" in kvray("status")
    kvray("clear", "--yes")
    wrong = tier.machine.run("pin", str(prompt), "--for", "1h", "--owner", "you", "-c", config)
    assert (wrong.returncode, "a pin of 'ops'" in wrong.stderr) == (2, True)
    kvray("up", "--restart")
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


HAMMERED_S, SETTLED_S = 20.0, 5.0
SHARE = 0.3


@pytest.mark.long
def test_a_prefix_that_three_nodes_hammer_is_as_near_as_a_local_one() -> None:
    arena = {"capacity": "128MiB", "slab": "16MiB"}
    copies = {"share": SHARE, "idle_s": 60.0}
    settings = {**SETTINGS, "arena": {**SETTINGS["arena"], **arena}, "copies": copies}
    with (
        Machine(num_nodes=3) as machine,
        open_tier(machine, "hammered", settings, num_nodes=3) as tier,
    ):
        found = hammered(tier)
        held, extra = keys_of(tier), [one["copies"]["extra_bytes"] for one in tier.shards()]
    capacity = 128 * 2**20
    ratios = []
    for number, one in enumerate(found):
        p99 = {}
        for name, asked in one.items():
            settled = [seconds for at, seconds, _ in asked if at >= SETTLED_S]
            p99[name] = float(np.quantile(settled, 0.99))
            whole = sum(count == hammering.LENGTH for at, _, count in asked if at >= SETTLED_S)
            print(f"node {number}, {name}: {len(settled)} requests, {whole} whole,", end=" ")
            print(f"p50 {1e3 * np.quantile(settled, 0.5):.2f} ms, p99 {1e3 * p99[name]:.2f} ms")
            assert whole == len(settled)
        ratios.append(p99["hot"] / p99["local"])
    num_held = sum(map(len, held))
    num_extra = num_held - len(set().union(*held))
    print(f"p99 of the hammered one by that of a local one: {[round(one, 2) for one in ratios]}")
    print(f"extra copies by node: {[f'{one / capacity:.3f}' for one in extra]} of its arena")
    print(f"{num_extra} of {num_held} blocks are extra")
    assert np.median(ratios) <= 1.2
    assert max(extra) <= SHARE * capacity
    assert num_extra * hammering.BLOCK <= 3 * SHARE * capacity


def hammered(tier: TwoNodes) -> list[dict[str, list[list[float]]]]:
    """Return what each node's program printed."""
    begin_at, command = time.time() + 20.0, (sys.executable, "-m", "tests.ray.hammering")
    programs = [
        subprocess.Popen(
            [*command, str(tier.node_dir(node)), str(number), str(begin_at), str(HAMMERED_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, node in enumerate(tier.nodes)
    ]
    found = []
    for program in programs:
        printed, _ = program.communicate(timeout=120)
        assert program.returncode == 0
        found.append(json.loads(printed))
    return found


def keys_of(tier: TwoNodes) -> list[set[bytes]]:
    """Return the keys that each node has in memory."""
    held = []
    for node in tier.nodes:
        with arena_of(tier, node) as arena:
            keys = arena.tables.slot_key[arena.tables.slots_in(READY)]
            held.append({key.tobytes() for key in keys})
    return held
