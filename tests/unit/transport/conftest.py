"""A couple of nixl's ends in two processes, over TCP."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvray.transport.nixl import NixlTransport
from kvray.transport.transport import Array
from tests.conformance import MEMORY_BYTES, pattern
from tests.far import Far

# Before the first agent of this process, which reads it; both processes are on one machine.
os.environ.setdefault("UCX_TLS", "tcp")

MARGIN_S = 1.0


class NixlSource:
    """The far process: sends from a memory of known content."""

    def __init__(self) -> None:
        self._transport = NixlTransport(pattern())

    def address(self) -> bytes:
        return self._transport.address

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, timeout_s: float
    ) -> Any:
        return self._transport.send(address, sources, targets, sizes, timeout_s=timeout_s)


class NixlCouple:
    """See `tests.conformance.Couple`."""

    def __init__(self, far: Far) -> None:
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.target = NixlTransport(self.memory)
        self.far = far
        self.pid = far.process.pid

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        asked = (address, sources, targets, sizes, timeout_s)
        return self.far.call("send", *asked, timeout_s=timeout_s + MARGIN_S)

    def kill(self) -> None:
        self.far.kill()


@pytest.fixture(scope="module")
def source() -> Iterator[Far]:
    """The far process: to start one takes a second of CPU."""
    far = Far("tests.unit.transport.conftest:NixlSource")
    yield far
    far.kill()


@pytest.fixture
def couple(source: Far) -> Iterator[NixlCouple]:
    """A couple with the far process of all tests, which goes on as it is."""
    made = NixlCouple(source)
    yield made
    made.target.close()


@pytest.fixture
def fragile() -> Iterator[NixlCouple]:
    """A couple with a far process of its own, which may be stopped or killed."""
    made = NixlCouple(Far("tests.unit.transport.conftest:NixlSource"))
    yield made
    made.target.close()
    made.far.kill()
