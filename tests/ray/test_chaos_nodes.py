"""Several nodes on one machine: what they are, and that nothing of them stays."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.lab.chaos import machine as machine_module
from kvray.lab.chaos.cleanup import processes_of
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from tests.ray.cluster import TwoNodes, open_tier, open_two_nodes
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
NO_NETWORK = why_impossible()

STARTING = """
import time
from kvray.lab.chaos.machine import Machine

machine = Machine(num_nodes=1)
print(machine.directory, machine.scratch, flush=True)
time.sleep(60)
"""


def shard_pids(nodes: TwoNodes) -> list[int]:
    return [process.pid for node in nodes.nodes for process in node.actors("Shard")]


@pytest.fixture
def two_nodes(machine: Machine) -> Iterator[TwoNodes]:
    with open_tier(machine, "own") as nodes:
        yield nodes


def test_each_node_has_a_shard_and_an_arena_of_its_own(two_nodes: TwoNodes) -> None:
    for node in two_nodes.nodes:
        assert len(node.actors("Shard")) == 1
        assert (two_nodes.node_dir(node) / "arena").exists()
    assert two_nodes.machine.head.actors("Shard") == []
    found = two_nodes.shards()
    assert [shard["state"] for shard in found] == ["serving", "serving"]
    assert sorted(shard["pid"] for shard in found) == sorted(shard_pids(two_nodes))


@pytest.mark.long
def test_a_killed_node_comes_back_with_another_id_and_adopts_its_arena() -> None:
    with open_two_nodes() as nodes:
        before = {shard["node_id"] for shard in nodes.shards()}
        node = nodes.nodes[0]
        node.kill()
        assert not node.is_running
        assert node.family() == []
        node.start()

        def has_come_back() -> bool:
            shards = nodes.shards()
            known = before & {shard.get("node_id") for shard in shards}
            return [shard["state"] for shard in shards] == ["serving"] * 2 and len(known) == 1

        wait_for(has_come_back, "the node's new shard")
        epochs = {shard["arena"]["shard_epoch"] for shard in nodes.shards()}
        assert epochs == {1, 2}


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
def test_nodes_with_cables_are_reached_until_one_is_cut() -> None:
    with open_two_nodes(has_network=True, mount_bytes=256 * 2**20) as nodes:
        machine = nodes.machine
        assert machine.network is not None
        assert len({machine.network.address(number) for number in range(3)}) == 3
        assert [shard["state"] for shard in nodes.shards()] == ["serving"] * 2
        for _ in range(2):  # two faults that overlap
            machine.network.slow(2, mbit=1, latency_ms=50)
            machine.network.cut(2)
        machine.network.speed_up(2)
        machine.network.speed_up(2)
        machine.network.heal(2)
        received = machine.network.bytes_in(2)
        assert machine.network.bytes_in(2) == received
        machine.network.heal(2)
        wait_for(lambda: machine.network.bytes_in(2) > received, "a byte")
        down = machine.run("down", "-c", str(nodes.config_path))
        assert down.returncode == 0, down.stderr
        assert not any(nodes.node_dir(node).exists() for node in nodes.nodes)
    assert processes_of(machine.directory) == []
    assert not machine.directory.exists()
    assert str(machine.directory) not in Path("/proc/self/mounts").read_text()


@pytest.fixture
def driver() -> Iterator["subprocess.Popen[str]"]:
    """A process that has started a cluster."""
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_of_a_cluster_whose_driver_ends(
    driver: "subprocess.Popen[str]", signum: signal.Signals
) -> None:
    assert driver.stdout is not None
    directory, shm = map(Path, driver.stdout.readline().split())
    assert processes_of(directory)
    driver.send_signal(signum)
    driver.wait(HANG_S)
    wait_for(lambda: not (directory.exists() or shm.exists()), "cleaning up")
    assert processes_of(directory) == []


def test_a_machine_that_does_not_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine_module, "_OBJECT_STORE_BYTES", 1)
    with pytest.raises(ConfigError, match="The Ray node head did not start; it said: "):
        Machine(num_nodes=1)
    assert list(tmp_path.iterdir()) == []
