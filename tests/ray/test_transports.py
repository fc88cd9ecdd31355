"""Blocks between actors: the transport by object references, and movers by either one."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from kvray.actors.mover.actor import create_mover
from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.calls import call
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from kvray.errors import KVRayError, TransferError
from kvray.store import Arena, ArenaOwner
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array
from tests.conformance import (
    MEMORY_BYTES,
    TRANSPORT_BEHAVIOURS,
    check_transport,
    pattern,
)
from tests.ray.conftest import config_with
from tests.unit.actors.small_mover import is_right
from tests.unit.store.small_arena import chain, make_arena, spec, store
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

MARGIN_S = 5.0
BLOCK = 1 << 20


class Source:
    """Sends from a memory of known content."""

    def __init__(self) -> None:
        self._transport = ObjectRefTransport(pattern())

    def pid(self) -> int:
        return os.getpid()

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, timeout_s: float
    ) -> Any:
        return self._transport.send(address, sources, targets, sizes, timeout_s=timeout_s)


class ObjectRefCouple:
    """See `tests.conformance.Couple`."""

    def __init__(self, sources: list[Any]) -> None:
        """Have the source that lives, or a new one if there is none."""
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.target = ObjectRefTransport(self.memory)
        self._sources = sources
        if not sources:
            sources.append(ray.remote(Source).options(num_cpus=0).remote())
        self._source = sources[0]
        self.pid = call(self._source.pid, timeout_s=60)

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        asked = (address, sources, targets, sizes, timeout_s)
        return call(self._source.send, *asked, timeout_s=timeout_s + MARGIN_S)

    def kill(self) -> None:
        psutil.Process(self.pid).kill()
        self._sources.clear()


@pytest.fixture(scope="module")
def sources(local: LocalRay) -> Iterator[list[Any]]:
    """The actor that sends; none before the first couple, and after a test has killed it."""
    made: list[Any] = []
    yield made
    for one in made:
        ray.kill(one)


@pytest.fixture
def couple(sources: list[Any]) -> Iterator[ObjectRefCouple]:
    made = ObjectRefCouple(sources)
    yield made
    made.target.close()


@pytest.mark.parametrize("behaviour", TRANSPORT_BEHAVIOURS, ids=lambda one: one.__name__)
def test_object_ref(behaviour, couple):
    check_transport(behaviour, couple)


def test_piece_is_one_object_that_is_seen_without_a_copy(couple):
    places = np.arange(0, 4 * BLOCK, 2 * BLOCK)
    sizes = np.full(2, BLOCK)
    parcel = couple.send(couple.target.address, places, places, sizes, timeout_s=10)
    assert [len(run) for run in parcel] == [BLOCK, BLOCK]
    assert not any(run.flags.owndata or run.flags.writeable for run in parcel)


def test_piece_of_another_length_is_refused(couple):
    place, size = np.zeros(1, dtype=np.int64), np.full(1, BLOCK)
    parcel = couple.send(couple.target.address, place, place, size, timeout_s=10)
    with pytest.raises(TransferError, match="of 4096 bytes came as 1048576"):
        couple.target.receive(parcel, place, place + 4096)


def test_objects_are_gone_once_their_pieces_are_in_place(couple):
    place, size = np.zeros(1, dtype=np.int64), np.full(1, MEMORY_BYTES)
    for _ in range(40):  # more than a small object store has room for
        parcel = couple.send(couple.target.address, place, place, size, timeout_s=10)
        couple.target.receive(parcel, place, size)
        del parcel
    wait_for(lambda: _stored() <= 4 * MEMORY_BYTES, "the end of the objects")


def _stored() -> float:
    """Return the bytes in use in the object store."""
    total = ray.cluster_resources()["object_store_memory"]
    return float(total - ray.available_resources().get("object_store_memory", 0))


TIMEOUT_S = 60.0


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
        pids: list[int] = []

        def serves() -> bool:
            with contextlib.suppress(KVRayError):
                status = self.status()
                pids.append(status["pid"])
                return status["state"] == "serving" and status["pid"] != but
            return False

        wait_for(serves, self.name)
        return pids[-1]

    def fetch(self, source: "Node", keys: list[Any], *, deadline_s: float = 20.0) -> FetchReport:
        span = Span(source=source.name, part=0, keys=b"".join(keys), parent=b"", depth=0)
        order = FetchOrder(spans=(span,), deadline_s=deadline_s)
        report: FetchReport = call(self.actor.fetch, order, timeout_s=TIMEOUT_S)
        return report

    def close(self) -> None:
        ray.kill(self.actor)
        self.arena.close()
        sweep(Path(self.config.node_dir), 10.0)


@pytest.fixture(params=["nixl", pytest.param("object_ref", marks=pytest.mark.long)])
def movers(request: pytest.FixtureRequest, local: LocalRay) -> Iterator[list[Node]]:
    """Two nodes whose movers have one transport."""
    made: list[Node] = []
    try:
        for name in "ab":
            made.append(Node(name, request.param))
        for node in made:
            node.wait_serving()
        yield made
    finally:
        for node in made:
            node.close()


def test_two_movers_bring_blocks_by_either_transport_and_never_wait_for_each_other(movers):
    a, b = movers
    of_a, of_b = chain(12, seed="a"), chain(12, seed="b")
    store(a.arena, of_a, block_bytes=BLOCK)
    store(b.arena, of_b, block_bytes=BLOCK)
    # As many as may run at once, on either side.
    orders = [(a, b, of_b), (b, a, of_a)] * a.config.staging.fetches_max
    with ThreadPoolExecutor(len(orders)) as threads:
        running = [threads.submit(to.fetch, of, keys) for to, of, keys in orders]
    assert all(one.result() for one in running)
    for to, of, keys in orders[:2]:
        assert to.fetch(of, keys).here == (12,)
        assert is_right(to.arena, keys, block_bytes=BLOCK)
        assert to.status()["bytes_fetched"] >= 12 * BLOCK
        assert to.status()["read_leases"] == 0
    keys = chain(30, seed="later")
    store(a.arena, keys, block_bytes=BLOCK)
    report = b.fetch(a, keys)
    assert report.here == (30,)
    assert (report.sources[a.name].transport,) == a.config.staging.transports


def test_a_mover_comes_back_when_it_was_killed_and_when_its_arena_was_replaced(movers):
    a, b = movers
    keys = chain(20, seed="again")
    store(a.arena, keys, block_bytes=BLOCK)
    for node in (a, b):
        pid = node.wait_serving()
        psutil.Process(pid).kill()
        node.wait_serving(but=pid)
    wait_for(lambda: b.fetch(a, keys, deadline_s=5.0).here == (20,), "all blocks")
    assert is_right(b.arena, keys, block_bytes=BLOCK)
    pid, before = a.wait_serving(), a.status()["arena_id"]
    ArenaOwner(a.arena).retire()
    a.arena.close()
    a.arena = make_arena(a.config.node_dir)
    a.wait_serving(but=pid)
    assert a.status()["arena_id"] != before
