"""Ray's head ends and starts again under load: engines go on, and their blocks are still there."""

import time
from collections.abc import Iterator

import pytest

from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.ray.under_load import UnderLoad, open_under_load
from tests.waiting import wait_for

NO_NETWORK = why_impossible()

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}"),
]

BACK_S = 240.0
"""Ray's nodes give a head up after a minute, and start again on a busy machine."""
BATCHES = 6


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two nodes whose head has the same address after each start."""
    with Machine(has_network=True) as machine, open_tier(machine, "nodes", SETTINGS) as made:
        yield made


@pytest.fixture
def engines(nodes: TwoNodes) -> Iterator[UnderLoad]:
    with open_under_load(nodes) as made:
        yield made


def start_head(machine: Machine) -> None:
    """Start a head where the last one was, as its service manager does."""
    # Ray looks for the old head in this file and among the raylets of the machine, and takes those
    # of the nodes, which are on others in earnest, for its own.
    (machine.directory / "head" / "ray_current_cluster").unlink(missing_ok=True)
    machine.head.start()


def restart_ended(machine: Machine) -> bool:
    """Start the nodes whose Ray has ended, as their service managers do; return whether all run."""
    for node in machine.nodes:
        if not node.is_running:
            node.kill()
            node.begin_start()
    return all(node.has_started for node in machine.nodes)


def test_a_head_that_starts_again_finds_the_blocks_and_engines_never_noticed(
    nodes: TwoNodes, engines: UnderLoad
) -> None:
    before, began = nodes.serving(), time.monotonic()
    nodes.machine.head.kill()
    time.sleep(5)
    start_head(nodes.machine)
    up = nodes.machine.begin("kvray", "up", "--no-wait", "-c", str(nodes.config_path))
    wait_for(lambda: up.poll() == 0, "kvray up")

    def is_back() -> bool:
        return restart_ended(nodes.machine) and len(nodes.serving()) == 2

    wait_for(is_back, "the shards of both nodes")
    back = time.monotonic()
    engines.wait_for_batches(BATCHES)
    print(f"shards back after {back - began:.1f} s")
    print(f"hits meanwhile {engines.hits(began, back)}, after it {engines.hits(back)}")
    print(f"longest batch {engines.longest_s(began)}, stall {engines.longest_stall_ms(began)}")
    for directory, shard in nodes.serving().items():
        was, now = before[directory]["arena"], shard["arena"]
        assert now["arena_id"] == was["arena_id"]
        assert now["blocks"] >= was["blocks"]
    assert min(engines.hits(began, back)) > 0, "engines find what their nodes have"
