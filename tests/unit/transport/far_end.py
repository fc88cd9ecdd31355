"""The source's process of a transport's tests."""

import time
from typing import Any

from kvray.transport.nixl import NixlTransport
from kvray.transport.transport import Array
from tests.conformance import pattern


class NixlSource:
    """Sends from a memory of known content."""

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
