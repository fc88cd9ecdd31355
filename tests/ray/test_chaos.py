"""`kvray chaos` on this machine: the short form of the run that goes on for minutes."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvray.lab.chaos.network import why_impossible
from kvray.lab.chaos.schedule import KINDS
from tests.ray.command_line import SHM, Shell, open_shell

pytestmark = pytest.mark.ray

TIMEOUT_S = 1200.0
SHORT = ("--duration", "20", "--gap", "1", "--seed", "5")
KEYS = {
    "faults_injected",
    "faults",
    "requests",
    "wrong_tokens",
    "engine_deaths",
    "hung_requests",
    "hit_tokens_ratio",
    "stall_ms_p99",
    "recovery_s_max",
    "unsettled_nodes",
}
MOVES = ("drain", "call_off", "preempt", "join")


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("chaos") as shell:
        yield shell


def play(shell: Shell, *options: str) -> dict[str, Any]:
    """Run it and return what it reports; nothing may be left of it."""
    with shell.start("chaos", "--json", *options) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert stdout, stderr
    found: dict[str, Any] = json.loads(stdout)
    assert process.returncode == 0, json.dumps(found["failures"], indent=2) + stderr
    assert shell.leftovers() == []
    assert found.keys() >= KEYS
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


@pytest.mark.long
def test_nothing_wrong_is_answered_and_nothing_hangs_on_one_node_under_fire(shell: Shell) -> None:
    found = play(shell, "--nodes", "1", "--replicas", "1", "--no-network", *SHORT)
    check(found)
    assert {"cut_link", "slow_link", "drain", "preempt"} <= set(found["skipped_kinds"])


@pytest.mark.long
def test_nothing_wrong_is_answered_and_nothing_hangs_on_two_nodes_under_fire(shell: Shell) -> None:
    found = play(shell, *SHORT)
    check(found)
    left_out = set(found["skipped_kinds"])
    assert bool(left_out) == (why_impossible() is not None)


@pytest.mark.long
def test_nothing_wrong_is_answered_and_nothing_hangs_while_nodes_go_and_come(shell: Shell) -> None:
    only = [word for kind in MOVES for word in ("--only", kind)]
    found = play(shell, "--nodes", "3", "--duration", "120", "--gap", "5", "--seed", "3", *only)
    check(found)
    assert found["faults"].keys() == set(MOVES)
    assert found["joined"]["requests"] > 0


@pytest.mark.long
def test_ten_minutes_under_fire(shell: Shell) -> None:
    found = play(shell, "--nodes", "3", "--duration", "600", "--gap", "2", "--seed", "1")
    check(found)
    assert found["faults_injected"] >= 200
    possible = {kind.name for kind in KINDS} - set(found["skipped_kinds"])
    assert found["faults"].keys() == possible
    assert found["hit_tokens_ratio"] >= 0.5


def test_an_unknown_kind_of_fault_is_refused_with_the_known_ones(shell: Shell) -> None:
    done = shell.run("chaos", "--only", "earthquake")
    assert done.returncode == 2
    known = ", ".join(sorted(kind.name for kind in KINDS))
    assert f"There is no kind of fault 'earthquake'; give one of {known}." in done.stderr


@pytest.mark.long
def test_an_interrupted_run_leaves_nothing(shell: Shell) -> None:
    before = set(os.listdir(SHM))
    done = shell.interrupt(
        "chaos", "--no-network", when=lambda: engines_run(shell), signum=signal.SIGINT
    )
    assert done.returncode == 130, done.stderr
    assert shell.leftovers() == []
    assert not [name for name in set(os.listdir(SHM)) - before if name.startswith("kvm-")]


def engines_run(shell: Shell) -> bool:
    """Return whether the replicas have started, or are about to."""
    return sum("kvray.reference.replica_child" in one for one in shell.commands()) == 3
