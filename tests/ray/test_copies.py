"""Copies on three nodes: extra ones stay within their bound, and what all nodes use stays near."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from kvray.lab.chaos.machine import Machine
from kvray.store.arena.layout import READY
from tests.ray import hammering
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.ray.test_drain import arena_of

pytestmark = [pytest.mark.ray]

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
