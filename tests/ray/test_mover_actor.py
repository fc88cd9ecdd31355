import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from kvray.actors.mover.actor import create_mover
from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.calls import call
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from kvray.errors import KVRayError
from kvray.store import Arena, ArenaOwner
from tests.ray.conftest import config_with
from tests.unit.actors.small_mover import is_right
from tests.unit.store.small_arena import chain, make_arena, spec, store

pytestmark = pytest.mark.ray

TIMEOUT_S = 60.0
BLOCK = 1 << 20


class Node:
    """An arena, and a mover for it; Ray has one node, which is no matter to movers."""

    def __init__(self, name: str, transport: str) -> None:
        self.name = f"kvray-test-{os.getpid()}-{name}"
        self.config: KVRayConfig = config_with(name, staging__transports=[transport])
        self.config.node_dir.mkdir()
        self.arena: Arena = make_arena(
            self.config.node_dir, asked=spec(num_slabs=32, slots_per_slab=256)
        )
        self.arena.join("owner")
        node_id = ray.get_runtime_context().get_node_id()
        self.actor: Any = create_mover(node_id, self.config, name=self.name)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = call(self.actor.status, timeout_s=TIMEOUT_S)
        return status

    def wait_serving(self, *, but: int = 0) -> int:
        """Return the pid of the mover that serves, which is another one than `but`."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except KVRayError:
                status = {"state": "gone", "pid": 0}
            if status["state"] == "serving" and status["pid"] != but:
                return int(status["pid"])
            time.sleep(0.1)
        raise AssertionError(f"{self.name} does not serve: {status}")

    def fetch(self, source: "Node", keys: list[Any], *, deadline_s: float = 20.0) -> FetchReport:
        span = Span(source=source.name, part=0, keys=b"".join(keys), parent=b"", depth=0)
        order = FetchOrder(spans=(span,), deadline_s=deadline_s)
        report: FetchReport = call(self.actor.fetch, order, timeout_s=TIMEOUT_S)
        return report

    def close(self) -> None:
        ray.kill(self.actor)
        self.arena.close()
        sweep(Path(self.config.node_dir), 10.0)


MakeNode = Callable[[str], Node]


@pytest.fixture(params=["nixl", pytest.param("object_ref", marks=pytest.mark.long)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_node(local: LocalRay, transport: str) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(name, transport))
        nodes[-1].wait_serving()
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def test_blocks_are_brought_by_either_transport(make_node: MakeNode, transport: str) -> None:
    a, b = make_node("a"), make_node("b")
    keys = chain(30)
    store(a.arena, keys, block_bytes=BLOCK)
    report = b.fetch(a, keys)
    assert report.here == (30,)
    assert report.sources[a.name].transport == transport
    assert is_right(b.arena, keys, block_bytes=BLOCK)
    assert b.status()["bytes_fetched"] == a.status()["bytes_sent"] == 30 * BLOCK
    assert call(a.actor.status, timeout_s=TIMEOUT_S)["read_leases"] == 0


def test_two_movers_that_fetch_from_each_other_never_wait_for_each_other(
    make_node: MakeNode,
) -> None:
    a, b = make_node("a"), make_node("b")
    of_a, of_b = chain(12, seed="a"), chain(12, seed="b")
    store(a.arena, of_a, block_bytes=BLOCK)
    store(b.arena, of_b, block_bytes=BLOCK)
    reports: list[FetchReport] = []
    threads = [
        # As many as may run at once, on either side.
        threading.Thread(target=lambda to=to, of=of, keys=keys: reports.append(to.fetch(of, keys)))
        for to, of, keys in [(a, b, of_b), (b, a, of_a)] * a.config.staging.fetches_max
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == len(threads)
    assert a.fetch(b, of_b).here == b.fetch(a, of_a).here == (12,)


def test_mover_that_was_killed_comes_back_and_goes_on(make_node: MakeNode) -> None:
    a, b = make_node("a"), make_node("b")
    keys = chain(20)
    store(a.arena, keys, block_bytes=BLOCK)
    for node in (a, b):
        pid = node.wait_serving()
        psutil.Process(pid).kill()
        node.wait_serving(but=pid)
    deadline = time.monotonic() + TIMEOUT_S
    while b.fetch(a, keys, deadline_s=5.0).here != (20,):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert is_right(b.arena, keys, block_bytes=BLOCK)


def test_mover_finds_the_arena_that_replaced_its_own(make_node: MakeNode) -> None:
    a = make_node("a")
    pid = a.wait_serving()
    before = a.status()["arena_id"]
    ArenaOwner(a.arena).retire()
    a.arena.close()
    a.arena = make_arena(a.config.node_dir)
    a.wait_serving(but=pid)
    assert a.status()["arena_id"] != before
