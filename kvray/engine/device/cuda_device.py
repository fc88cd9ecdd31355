"""An NVIDIA GPU, through torch and, for copies by address, through its driver."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from kvray.engine.device.cuda_driver import CudaDriver
from kvray.engine.device.pieces import Pieces
from kvray.errors import TierError
from kvray.store.arena.tables import Array

_log = logging.getLogger("kvray.connector")

BATCHED, SINGLE, PAGEABLE = "batched", "single", "pageable"
"""How copies were made: many in one call, one in a call, or from memory that is not registered."""

_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered: by another pool of this process, which will undo it."""


class CudaDevice:
    """The GPU of a pool's tensors. Until it is used, no call to CUDA is made.

    Calls are made inside `current`, from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: CudaDriver | None = None
        self._batches = True
        self._others: set[int] = set()
        """Addresses of memory that somebody else has registered."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make it the calling thread's device."""
        return torch.cuda.device(self._device)

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> "Event":
        """Return the point behind all work that `stream` has been given so far."""
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps, and does not spin
        with _mapped():
            event.record(stream)
        return Event(event)

    def wait(self, stream: torch.cuda.Stream, event: "Event") -> None:
        """Have what `stream` is given from now on run after `event`."""
        with _mapped():
            stream.wait_event(event.event)

    def copy(
        self, pieces: Pieces, stream: torch.cuda.Stream, *, is_load: bool, is_registered: bool
    ) -> str:
        """Give `stream` copies between the device and an arena; return how they are made.

        `is_load`: to the device, and the arena's bytes do not change. TierError: it refuses them.
        """
        driver, handle = self._driver(), stream.cuda_stream
        if is_registered and self._batches and len(pieces.sizes) > 1:
            error = driver.copy_batch(pieces, handle, is_stable=is_load)
            if not error:
                return BATCHED
            self._batches = False
            _log.warning(
                "kvray: %s refuses batches of copies (%s); they are made one by one, which is"
                " slower for small blocks (said once)",
                self._device,
                driver.name_of(error),
            )
        # What a batch has begun before it failed is done again: it is the same bytes.
        error = driver.copy_each(pieces, handle)
        if error:
            raise TierError(
                f"{self._device} refuses a copy from or to the arena ({driver.name_of(error)});"
                " restart the engine if it goes on."
            )
        return SINGLE if is_registered else PAGEABLE

    def register(self, memory: Array) -> bool:
        """Make host memory fast to copy from and to; False if it cannot be, which is logged."""
        address = memory.ctypes.data
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))
        except RuntimeError as failure:
            return self._say_pageable(str(failure))
        if error == _ALREADY_REGISTERED:
            self._others.add(address)
        elif error:
            return self._say_pageable(f"error {error}")
        return True

    def unregister(self, memory: Array) -> None:
        """Undo `register`; no copy of it may be under way."""
        address = memory.ctypes.data
        if address in self._others:
            self._others.discard(address)
        else:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _driver(self) -> CudaDriver:
        """Return the driver, loaded at the first copy; TierError: it cannot be."""
        if self._opened is None:
            try:
                self._opened = CudaDriver(self._device.index)
            except OSError as error:
                raise TierError(f"The CUDA driver cannot be used ({error.strerror}).") from None
            self._batches = self._opened.can_batch
        return self._opened

    def _say_pageable(self, why: str) -> bool:
        _log.warning(
            "kvray: the arena cannot be registered with %s (%s): copies are slow and hold the"
            " engine up; raise the limit of locked memory (`ulimit -l unlimited`, in a container"
            " `--ulimit memlock=-1`), or make arena.capacity smaller, and restart the engine",
            self._device,
            why,
        )
        return False


class Event:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """Return whether the work before it has ended."""
        with _mapped():
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until it has passed; TierError: no answer."""
        with _mapped():
            self.event.synchronize()


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise TierError(f"The GPU failed ({cause}); restart the engine.") from error
