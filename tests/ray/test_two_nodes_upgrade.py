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

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

OTHER = "0.99.0"
CHANGE = f"kvray is {OTHER} now and was {kvray.__version__}."
SITES = ("head", "node1", "node2")
BATCHES = 6


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


def arenas(nodes: TwoNodes) -> dict[str, tuple[str, int, int]]:
    """Return shard -> its arena's id, its epoch and the number of blocks in it."""
    return {
        one["shard"]: tuple(one["arena"][key] for key in ("arena_id", "shard_epoch", "blocks"))
        for one in nodes.shards()
    }


def test_an_upgrade_node_after_node_is_not_felt_by_engines(
    nodes: TwoNodes, sites: dict[str, Path], engines: UnderLoad
) -> None:
    began = time.monotonic()
    before = arenas(nodes)
    assert len(before) == 2
    usual = engines.hits(began - 10)
    assert "Nothing would be done" in say(nodes, "upgrade", "--plan")
    told = ""
    for name in ("node1", "node2", "head"):
        install(sites[name])
        told += say(nodes, "upgrade")
        # Parts of both versions serve together for a while.
        since = time.monotonic()
        engines.wait_for_batches(BATCHES, within_s=60)
        now = arenas(nodes)
        print(f"{name}: hits {engines.hits(since)}, {now}")
    print(told)
    print(f"longest batch {engines.longest_s(began)}, stall {engines.longest_stall_ms(began)}")
    assert all(f"{shard} (" in told for shard in before)
    assert told.count(CHANGE) >= 4, "supervisor, lookup, and a shard and a mover of each node"
    assert "Nothing would be done" in say(nodes, "upgrade", "--plan")
    for shard, (arena_id, epoch, blocks) in before.items():
        assert now[shard][:2] == (arena_id, epoch + 1)
        assert now[shard][2] >= blocks
    for share, was in zip(engines.hits(since), usual, strict=True):
        assert share >= 0.9 * was
