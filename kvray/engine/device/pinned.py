"""An arena's memory registered with a device, chunk by chunk, while the arena is already in use."""

import threading
from collections.abc import Callable

from kvray.engine.device.cuda_device import CudaDevice
from kvray.errors import ShardUnavailable
from kvray.store import Arena
from kvray.store.arena.tables import Array

_CHUNK_BYTES = 128 * 2**20
"""While a chunk is registered, other calls of the device may have to wait."""

_LOOK_S = 1.0
"""How often to look whether the arena is over: an engine that is idle must not keep its memory."""


class PinnedArena:
    """One arena in one process; its thread keeps the mapping alive until it is unregistered."""

    def __init__(self, arena: Arena, device: CudaDevice, settle: Callable[[], None]) -> None:
        """Begin to register; `settle` returns when copies asked for before have ended."""
        tables = arena.tables
        self._data: Array | None = tables.data
        slab = tables.geometry.slab_bytes
        self.chunk_bytes = max(1, _CHUNK_BYTES // slab) * slab
        """A chunk has whole slabs, so no slot lies in two."""
        self._arena = arena
        self._device = device
        self._settle = settle
        self._registered_bytes = 0
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-pin", daemon=True)
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        """Bytes from the start of the data that are registered; grows, and drops to 0 once."""
        return 0 if self._leaving.is_set() else self._registered_bytes

    @property
    def has_left(self) -> bool:
        """Whether its memory is unregistered."""
        return self._data is None

    @property
    def is_over(self) -> bool:
        """Whether no new copy will touch the arena but those of leases that it still has."""
        if self._data is None:
            return True
        try:
            return self._arena.retired
        except ShardUnavailable:  # this process has closed it
            return True

    def leave(self) -> None:
        """Have the memory unregistered as soon as no copy touches it; twice is fine."""
        self._leaving.set()

    def join(self, timeout_s: float) -> None:
        """Wait until it is unregistered, after `leave`; its thread goes on if that takes longer."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        data, chunks = self._data, []
        assert data is not None, "it is let go of below"
        with self._device.current():
            for at in range(0, len(data), self.chunk_bytes):
                chunk = data[at : at + self.chunk_bytes]
                if self._leaving.is_set() or not self._device.register(chunk):
                    break
                chunks.append(chunk)
                self._registered_bytes = at + len(chunk)
        while not self._leaving.wait(_LOOK_S):
            if self.is_over:
                self._leaving.set()
        self._settle()
        with self._device.current():
            for chunk in chunks:
                self._device.unregister(chunk)
        self._data = None
