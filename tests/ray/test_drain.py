"""Nodes that are to go, by `kvray drain` and as Ray says: what only they have is on others then."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import Machine, Node
from kvray.store import Arena
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.unit.store.small_arena import PATIENT_S, chain, store
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray]

NUM_CHAINS, LENGTH = 12, 16


@pytest.fixture(scope="module")
def tier(machine: Machine, taken_away: list[Node]) -> Iterator[TwoNodes]:
    with open_tier(machine, "drained", SETTINGS, num_nodes=3) as made:
        yield made
    for node in taken_away:  # Ray takes no drain back, and the machine is not this module's alone
        node.kill()
        node.start()


@pytest.fixture(scope="module")
def taken_away() -> list[Node]:
    """The nodes that Ray was told to drain."""
    return []


@contextlib.contextmanager
def arena_of(tier: TwoNodes, node: Node) -> Iterator[Arena]:
    """Attach to a node's arena, as its engines do."""
    arena = Arena(tier.node_dir(node), lock_wait_s=PATIENT_S)
    arena.join("test")
    with contextlib.closing(arena):
        yield arena


def filled(tier: TwoNodes, node: Node, name: str) -> list[list[BlockKey]]:
    """Store chains on a node, and return their keys."""
    chains = [chain(LENGTH, seed=f"{name} {at}") for at in range(NUM_CHAINS)]
    with arena_of(tier, node) as arena:
        for keys in chains:
            store(arena, keys)
    return chains


def num_held(tier: TwoNodes, node: Node, chains: list[list[BlockKey]]) -> int:
    """Return how many whole chains a node has."""
    with arena_of(tier, node) as arena:
        return sum(arena.match(keys) == LENGTH for keys in chains)


def node_id_of(tier: TwoNodes, node: Node) -> str:
    directory = str(tier.node_dir(node))
    (found,) = (one["node_id"] for one in tier.shards() if one["directory"] == directory)
    return str(found)


def drain_of(tier: TwoNodes, node_id: str) -> dict[str, object]:
    (found,) = (one for one in tier.shards() if one["node_id"] == node_id)
    return dict(found.get("drain") or {})


def test_a_node_that_is_drained_by_hand_gives_others_what_only_it_has(tier: TwoNodes) -> None:
    first, *others = tier.nodes
    chains = filled(tier, first, "by hand")
    node_id, config = node_id_of(tier, first), str(tier.config_path)

    done = tier.machine.run("drain", node_id[:12], "--deadline", "60", "-c", config)

    assert done.returncode == 0, done.stderr
    assert "may: 192 blocks" in done.stdout
    shares = [num_held(tier, node, chains) for node in others]
    assert sum(shares) == NUM_CHAINS
    assert all(shares), "both of them take some"
    assert drain_of(tier, node_id)["by"] == ["kvray drain"]
    assert "is to go" in tier.machine.run("status", "-c", config).stdout
    back = tier.machine.run("drain", node_id[:12], "--cancel", "-c", config)
    assert back.returncode == 0, back.stderr
    assert not drain_of(tier, node_id)
    wrong = tier.machine.run("drain", "0123", "-c", config)
    assert wrong.returncode == 2
    assert node_id[:12] in wrong.stderr


@pytest.mark.long
def test_a_node_that_ray_takes_away_gives_others_what_only_it_has(
    tier: TwoNodes, taken_away: list[Node]
) -> None:
    going, *others = reversed(tier.nodes)
    taken_away.append(going)
    chains = filled(tier, going, "by Ray")
    node_id = node_id_of(tier, going)
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--address", tier.machine.address, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]

    subprocess.run(
        [*command, "--deadline-remaining-seconds", "60"],
        env=tier.machine.environ(),
        check=True,
        capture_output=True,
        timeout=60,
    )

    wait_for(
        lambda: sum(num_held(tier, node, chains) for node in others) == NUM_CHAINS,
        "the blocks' way to other nodes",
    )
    wait_for(
        lambda: not {node_id, None} & {one.get("node_id") for one in tier.shards()},
        "the end of a shard that no engine uses",
    )
    assert not going.actors("Mover")
    assert going.is_running, "it is Ray's business when the node goes"
