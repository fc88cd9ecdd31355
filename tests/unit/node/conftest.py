"""A node's directory, shards that can be started and stopped there again, and links to them."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.node import NodeLink, Registration, attach
from kvray.node import link as link_module
from kvray.store import Arena
from tests.unit.actors.small_shard import NAMESPACE, Line, settings_for, wait_until_serving
from tests.waiting import wait_for

StartShard = Callable[..., Shard]
MakeLink = Callable[[], NodeLink]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A cluster's directory, which the shard makes."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield parent / "kvray-test"
    shutil.rmtree(parent)


@pytest.fixture
def start_shard(directory: Path) -> Iterator[StartShard]:
    """Starts a shard and returns when it serves."""
    shards: list[Shard] = []

    def start(**changes: Any) -> Shard:
        shards.append(Shard("a", settings_for(directory, **changes), [Line().announce]))
        shards[-1].start()
        wait_until_serving(shards[-1])
        return shards[-1]

    yield start
    for shard in shards:
        shard.stop(retire=False, timeout_s=10)
    sweep(directory)


@pytest.fixture
def shard(start_shard: StartShard) -> Shard:
    return start_shard()


@pytest.fixture
def make_link(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLink]:
    """Attaches to the test's directory; looks and reports often."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    links: list[NodeLink] = []

    def make() -> NodeLink:
        links.append(attach(directory, label="test", lock_wait_s=0.05, attach_retry_s=0.02))
        return links[-1]

    yield make
    for link in links:
        link.detach()


@pytest.fixture
def link(shard: Shard, make_link: MakeLink) -> NodeLink:
    """A link whose shard serves."""
    return make_link()


def registration(replica: str = "one", **changes: Any) -> Registration:
    plain = Registration(replica=replica, rank=0, namespace=NAMESPACE, counters=lambda: {"hits": 3})
    return dataclasses.replace(plain, **changes)


def arena_of(link: NodeLink) -> Arena:
    """Return the link's arena once it has one."""
    wait_for(lambda: link.arena, "attaching")
    arena = link.arena
    assert arena is not None
    return arena
