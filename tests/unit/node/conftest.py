"""A node's directory, shards that can be started and stopped there again, and links to them."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.node import NodeLink, Registration, attach
from kvray.node import link as link_module
from kvray.store import Arena
from tests.unit.actors.conftest import directory, line, make_shard, shard, start_shard
from tests.unit.actors.small_shard import NAMESPACE
from tests.waiting import wait_for

__all__ = ["directory", "line", "make_shard", "shard", "start_shard"]

MakeLink = Callable[[], NodeLink]


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
    return link.arena


def in_a_fork(act: Callable[[], int]) -> int:
    """Return the exit status of a child of this process, which is what `act` returns there."""
    child = os.fork()
    if child == 0:
        status = -1
        try:
            status = act()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
