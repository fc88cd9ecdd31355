"""Another version of kvray is installed on two nodes, one after the other, under load."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvray
from kvray.lab.chaos.machine import Machine
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.ray.under_load import UnderLoad, open_under_load

pytestmark = [pytest.mark.ray, pytest.mark.long]

OTHER = "0.99.0"
CHANGE = f"kvray is {OTHER} now and was {kvray.__version__}."
SITES = ("head", "node1", "node2")
BATCHES = 6
STALL_MS = 500.0
"""An engine's pass may wait for a fetch, never for a part that restarts."""


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A copy of kvray for each machine, as each has its own; commands find no other one."""
    monkeypatch.chdir(tmp_path)  # Ray's workers look into the directory of a command first
    found = {name: tmp_path / name for name in SITES}
    for path in found.values():
        shutil.copytree(Path(kvray.__file__).parent, path / "kvray")
    return found


@pytest.fixture
def nodes(sites: dict[str, Path]) -> Iterator[TwoNodes]:
    with Machine(environ={"PYTHONPATH": str(sites["head"])}) as machine:
        for node in machine.nodes:
            node.kill()
            node.environ["PYTHONPATH"] = str(sites[node.name])
            node.start()
        with open_tier(machine, "nodes", SETTINGS) as made:
            yield made


@pytest.fixture
def engines(nodes: TwoNodes) -> Iterator[UnderLoad]:
    with open_under_load(nodes) as made:
        yield made


def install(site: Path) -> None:
    """Install another version over the one that is there."""
    path = site / "kvray" / "__init__.py"
    text = path.read_text()
    assert text.count(kvray.__version__) == 1
    path.write_text(text.replace(kvray.__version__, OTHER))


def say(nodes: TwoNodes, *args: str) -> str:
    done = nodes.machine.run(*args, "-c", str(nodes.config_path), timeout_s=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_an_upgrade_node_after_node_is_not_felt_by_engines(
    nodes: TwoNodes, sites: dict[str, Path], engines: UnderLoad
) -> None:
    began = time.monotonic()
    before = nodes.serving()
    assert len(before) == 2
    usual = engines.hits(0.0)
    assert "Nothing would be done" in say(nodes, "up", "--plan")
    told = ""
    print(f"before: hits {usual}, longest batch {engines.longest_s(0.0)} s")
    for name in ("node1", "node2", "head"):
        install(sites[name])
        told += say(nodes, "up")
        # Parts of both versions serve together for a while.
        since = time.monotonic()
        engines.wait_for_batches(BATCHES)
        print(f"{name}: hits {engines.hits(since)}")
    print(told)
    stall_ms = engines.longest_stall_ms(began)
    print(f"longest batch {engines.longest_s(began)} s, longest stall {stall_ms} ms")
    shards = [one["shard"] for one in before.values()]
    movers = [name.replace("shard", "mover") for name in shards]
    parts = ("The supervisor", "The lookup", *shards, *movers)
    assert all(f"{part} was restarted: {CHANGE}" in told for part in parts)
    assert told.count("blocks in memory as before") == len(before)
    assert "Nothing would be done" in say(nodes, "up", "--plan")
    for directory, shard in nodes.serving().items():
        was, now = before[directory]["arena"], shard["arena"]
        assert now["arena_id"] == was["arena_id"]
        assert now["shard_epoch"] == was["shard_epoch"] + 1
        assert now["blocks"] >= was["blocks"]
    for share, usually in zip(engines.hits(since), usual, strict=True):
        assert share >= 0.9 * usually
    assert stall_ms < STALL_MS
