"""A node joins a tier of two on real Ray, and has what they use most before anybody asks for it."""

from collections.abc import Iterator

import pytest

from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.node import Node
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.ray.test_drain import NUM_CHAINS, filled, node_id_of, num_held
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def tier() -> Iterator[TwoNodes]:
    with Machine(num_nodes=3) as machine:
        machine.nodes[-1].kill()
        with open_tier(machine, "warmed", SETTINGS, num_nodes=3) as made:
            yield made


@pytest.fixture(scope="module")
def joined(tier: TwoNodes) -> list[list[BlockKey]]:
    """Fill two nodes and have a third one join; return the keys of all chains."""
    first, second, last = tier.nodes
    chains = [*filled(tier, first, "first"), *filled(tier, second, "second")]
    last.start()
    return chains


def warm_up_of(tier: TwoNodes, node: Node) -> dict[str, object]:
    directory = str(tier.node_dir(node))
    found = [one.get("warm_up") for one in tier.shards() if one["directory"] == directory]
    return dict((found and found[0]) or {})


def test_a_node_that_joins_has_what_others_use_most(
    tier: TwoNodes, joined: list[list[BlockKey]]
) -> None:
    last = tier.nodes[-1]
    wait_for(lambda: warm_up_of(tier, last).get("state") == "done", "a warm-up")
    assert num_held(tier, last, joined) == 2 * NUM_CHAINS
    assert len(warm_up_of(tier, last)["sources"]) == 2  # type: ignore[arg-type]


def test_a_node_is_warmed_up_by_hand(tier: TwoNodes, joined: list[list[BlockKey]]) -> None:
    first, _, last = tier.nodes
    chains = filled(tier, first, "by hand")
    node_id, config = node_id_of(tier, last), str(tier.config_path)

    done = tier.machine.run("warm", node_id[:12], "--deadline", "30", "-c", config)

    assert done.returncode == 0, done.stderr
    assert "was warmed up (kvray warm): 192 blocks" in done.stdout
    assert num_held(tier, last, chains) == NUM_CHAINS
    assert "was warmed up" in tier.machine.run("status", "-c", config).stdout
    wrong = tier.machine.run("warm", "0123", "-c", config)
    assert wrong.returncode == 2
    assert node_id[:12] in wrong.stderr
    nobody = tier.machine.run("warm", "--replica", "nobody", "-c", config)
    assert nobody.returncode == 2
