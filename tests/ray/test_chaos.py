"""`kvray chaos` on this machine, and the nodes it is played on: nothing of them stays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.tier import ray_node
from kvray.errors import ConfigError
from kvray.lab.chaos.cleanup import processes_of
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from kvray.lab.chaos.schedule import KINDS
from tests.kit.ray.cluster import open_two_nodes
from tests.kit.ray.command_line import ROOT, SHM, Shell
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.ray

NO_NETWORK = why_impossible()
TIMEOUT_S = 1200.0


def play(shell: Shell, *options: str) -> dict[str, Any]:
    """Run it and return what it reports; nothing may be left of it."""
    with shell.start("chaos", "--json", *options) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert stdout, stderr
    found: dict[str, Any] = json.loads(stdout)
    assert process.returncode == 0, json.dumps(found["failures"], indent=2) + stderr
    assert shell.leftovers() == []
    return found


def check(found: dict[str, Any]) -> None:
    """Hold a run against what must be true of every one."""
    assert found["wrong_tokens"] == 0
    assert found["engine_deaths"] == 0
    assert found["hung_requests"] == 0
    assert found["unsettled_nodes"] == 0
    assert found["faults_injected"] == sum(found["faults"].values()) > 0
    assert found["in_flight_min"] >= 10
    assert found["requests"] > 0
    assert {"stall_ms_p99", "recovery_s_max"} <= found.keys()


@pytest.mark.long
def test_nothing_wrong_is_answered_and_nothing_hangs_under_fire_on_one_node(shell):
    alone = ("--nodes", "1", "--replicas", "1", "--no-network", "--duration", "20", "--gap", "1")
    found = play(shell, *alone, "--seed", "5")
    check(found)
    assert {"cut_link", "slow_link", "drain", "preempt"} <= set(found["skipped_kinds"])


@pytest.mark.long
def test_ten_minutes_under_fire(shell):
    found = play(shell, "--nodes", "3", "--duration", "600", "--gap", "2", "--seed", "1")
    check(found)
    assert found["faults_injected"] >= 200
    assert bool(found["skipped_kinds"]) == (NO_NETWORK is not None)
    possible = {kind.name for kind in KINDS} - set(found["skipped_kinds"])
    assert found["faults"].keys() == possible, "nodes go and come, too"
    assert found["joined"]["requests"] > 0
    assert found["hit_tokens_ratio"] >= 0.5


@pytest.mark.long
def test_an_interrupted_run_leaves_nothing(shell):
    before = set(os.listdir(SHM))
    options = ("chaos", "--no-network")
    done = shell.interrupt(*options, when=shell.has_engines, signum=signal.SIGINT)
    assert done.returncode == 130, done.stderr
    assert shell.leftovers() == []
    assert not [name for name in set(os.listdir(SHM)) - before if name.startswith("kvm-")]


STARTING = """
import time
from kvray.lab.chaos.machine import Machine

machine = Machine(num_nodes=1)
print(machine.directory, machine.scratch, flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
def test_nodes_with_cables_are_reached_until_one_is_cut():
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
        nodes.say("down")
        assert not any(nodes.node_dir(node).exists() for node in nodes.nodes)
    assert processes_of(machine.directory) == []
    assert not machine.directory.exists()
    assert str(machine.directory) not in Path("/proc/self/mounts").read_text()


@pytest.mark.long
def test_nothing_stays_of_a_cluster_whose_driver_is_killed():
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        directory, shm = map(Path, driver.stdout.readline().split())
        assert processes_of(directory)
        driver.kill()
        driver.wait(HANG_S)
    wait_for(lambda: not (directory.exists() or shm.exists()), "cleaning up")
    assert processes_of(directory) == []


def test_a_machine_that_does_not_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_node, "OBJECT_STORE_BYTES", 1)
    with pytest.raises(ConfigError, match="The Ray node head did not start, but ended"):
        Machine(num_nodes=1)
    assert list(tmp_path.iterdir()) == []
