"""A bare push of NIXL: its own Python API with its own defaults, and nothing of kvray."""

from __future__ import annotations

import importlib
import secrets
import time
from typing import Any, NamedTuple

from kvray.errors import KVRayError
from kvray.transport.nixl import bindings
from kvray.transport.transport import Array

_POLL_S = 0.0002
_TIMEOUT_S = 120.0
_FIRST_BYTES = 4096
_DRAM = "DRAM"


class BareAddress(NamedTuple):
    """Where pushes go to."""

    metadata: bytes
    base: int


class BareNixl:
    """One end. A thread of NIXL's keeps a core busy until nobody refers to it."""

    def __init__(self, memory: Array) -> None:
        """Register `memory`.

        Raises:
            TransportUnavailable: NIXL is not installed.
        """
        package = bindings().__name__.rpartition(".")[0]
        api = importlib.import_module(f"{package}._api")
        self._memory = memory
        self._base = memory.ctypes.data
        self._agent: Any = api.nixl_agent(f"bare-{secrets.token_hex(4)}")
        self._agent.register_memory([(self._base, len(memory), 0, "")], _DRAM)
        self._peer = ""

    @property
    def address(self) -> BareAddress:
        """Where others push to."""
        return BareAddress(self._agent.get_agent_metadata(), self._base)

    def connect(self, address: BareAddress) -> None:
        """Make another end known, and do what the first push to it would wait for."""
        self._peer = self._agent.add_remote_agent(address.metadata)
        self.push(address, _FIRST_BYTES)

    def push(self, address: BareAddress, num_bytes: int) -> None:
        """Push the first bytes of the memory to the same place there, as one transfer.

        Raises:
            KVRayError: NIXL says that it failed, or it did not end.
        """
        agent = self._agent
        local = agent.get_xfer_descs([(self._base, num_bytes, 0)], _DRAM)
        remote = agent.get_xfer_descs([(address.base, num_bytes, 0)], _DRAM)
        handle = agent.initialize_xfer("WRITE", local, remote, self._peer)
        deadline = time.monotonic() + _TIMEOUT_S
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KVRayError(f"A bare push of NIXL did not end ({state}); run the bench again.")
