"""`kvray logs` on a tier of two nodes, one of whose shards is frozen."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.lab.chaos.machine import Machine
from tests.ray.cluster import open_tier
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

DEATH = "mover died; its leases ended"


@contextlib.contextmanager
def frozen(machine: Machine) -> Iterator[None]:
    """Have a shard stand still, and the supervisor, which would replace it."""
    processes = [machine.actors("Supervisor")[0], machine.actors("Shard")[0]]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextlib.contextmanager
def following(machine: Machine, *args: str, output: Path) -> Iterator[None]:
    """Have `kvray logs -f` write to a file, and end it as a person would."""
    command = [sys.executable, "-m", "kvray", "logs", "-f", *args]
    with (
        output.open("w") as file,
        output.with_suffix(".err").open("w") as errors,
        subprocess.Popen(command, env=machine.environ(), stdout=file, stderr=errors) as process,
    ):
        try:
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def test_logs_of_all_nodes_are_merged_and_followed_while_a_shard_is_frozen(
    machine: Machine, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with open_tier(machine, "logs") as nodes, frozen(machine):
        with following(machine, "--json", "-c", str(nodes.config_path), output=output):
            wait_for(output.read_text, "the first lines")
            machine.actors("Mover")[-1].kill()
            wait_for(lambda: DEATH in output.read_text(), "what comes")
    remarks = output.with_suffix(".err").read_text().splitlines()
    named = [line.split()[1] for line in remarks if "does not answer now" in line]
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    parts = {entry["part"] for entry in entries}
    shards = {part for part in parts if part.startswith("kvray-shard-")}
    assert len(shards) == 2, "the file of a frozen one can be read"
    assert named[0] in shards
    assert named[1:] == ["kvray-supervisor"]
    assert {"kvray-lookup", "kvray-supervisor"} < parts
    first = [entry["time_s"] for entry in entries[: len(parts)]]
    assert first == sorted(first)
