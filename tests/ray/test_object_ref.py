import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from kvray.actors.ray_glue.calls import call
from kvray.actors.tier.local_ray import LocalRay
from kvray.errors import TransferError
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array
from tests.conformance import (
    MEMORY_BYTES,
    TRANSPORT_BEHAVIOURS,
    Couple,
    check_transport,
    pattern,
)

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

    def __init__(self) -> None:
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.target = ObjectRefTransport(self.memory)
        self._source = ray.remote(Source).options(num_cpus=0).remote()
        self.pid = call(self._source.pid, timeout_s=60)

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        asked = (address, sources, targets, sizes, timeout_s)
        return call(self._source.send, *asked, timeout_s=timeout_s + MARGIN_S)

    def kill(self) -> None:
        psutil.Process(self.pid).kill()

    def close(self) -> None:
        ray.kill(self._source)
        self.target.close()


@pytest.fixture
def couple(local: LocalRay) -> Iterator[ObjectRefCouple]:
    made = ObjectRefCouple()
    yield made
    made.close()


@pytest.mark.parametrize("behaviour", TRANSPORT_BEHAVIOURS, ids=lambda one: one.__name__)
def test_object_ref(behaviour: Callable[[Couple], None], couple: ObjectRefCouple) -> None:
    check_transport(behaviour, couple)


def test_piece_is_one_object_that_is_seen_without_a_copy(couple: ObjectRefCouple) -> None:
    places = np.arange(0, 4 * BLOCK, 2 * BLOCK)
    sizes = np.full(2, BLOCK)
    parcel = couple.send(couple.target.address, places, places, sizes, timeout_s=10)
    assert [len(run) for run in parcel] == [BLOCK, BLOCK]
    assert not any(run.flags.owndata or run.flags.writeable for run in parcel)


def test_piece_of_another_length_is_refused(couple: ObjectRefCouple) -> None:
    place, size = np.zeros(1, dtype=np.int64), np.full(1, BLOCK)
    parcel = couple.send(couple.target.address, place, place, size, timeout_s=10)
    with pytest.raises(TransferError, match="of 4096 bytes came as 1048576"):
        couple.target.receive(parcel, place, place + 4096)


def test_objects_are_gone_once_their_pieces_are_in_place(couple: ObjectRefCouple) -> None:
    place, size = np.zeros(1, dtype=np.int64), np.full(1, MEMORY_BYTES)
    for _ in range(40):  # more than a small object store has room for
        parcel = couple.send(couple.target.address, place, place, size, timeout_s=10)
        couple.target.receive(parcel, place, size)
        del parcel
    deadline = time.monotonic() + 60
    while _stored() > 4 * MEMORY_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _stored() <= 4 * MEMORY_BYTES


def _stored() -> float:
    """Return the bytes in use in the object store."""
    total = ray.cluster_resources()["object_store_memory"]
    return float(total - ray.available_resources().get("object_store_memory", 0))
