"""What a pool needs of the device that its pages lie on: streams, events, copies.

`CudaDevice` has them; `HostDevice` is for tensors in host memory, where everything happens at once.
"""

import contextlib
import ctypes
from typing import Any, Protocol

from kvray.connector.device.pieces import Pieces
from kvray.store.arena.tables import Array

BATCHED, SINGLE, PAGEABLE = "batched", "single", "pageable"
"""How copies were made: many in one call, one in a call, or from memory that is not registered."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether the work before it has ended."""

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until it has passed; TierError: no answer."""


class Device(Protocol):
    """A device; calls are made inside `current`, from any thread."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which it is the calling thread's device."""

    def make_stream(self) -> Any:
        """Return a new stream."""

    def record(self, stream: Any) -> Event:
        """Return the point behind all work that `stream` has been given so far."""

    def wait(self, stream: Any, event: Event) -> None:
        """Have what `stream` is given from now on run after `event`."""

    def copy(self, pieces: Pieces, stream: Any, *, is_load: bool, is_registered: bool) -> str:
        """Give `stream` copies between the device and an arena; return how they are made.

        `is_load`: they go to the device, and the arena's bytes do not change. `is_registered`: all
        of the arena's bytes are. TierError: the device refuses them.
        """

    def register(self, memory: Array) -> bool:
        """Make host memory fast to copy from and to; False if it cannot be, which is logged."""

    def unregister(self, memory: Array) -> None:
        """Undo `register`; no copy of it may be under way."""


class HostDevice:
    """Tensors in host memory; what is asked for is done when the call returns."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def make_stream(self) -> None:
        pass

    def record(self, stream: Any) -> Event:
        return _PAST

    def wait(self, stream: Any, event: Event) -> None:
        pass

    def copy(self, pieces: Pieces, stream: Any, *, is_load: bool, is_registered: bool) -> str:
        for target, source, size in zip(*(column.tolist() for column in pieces), strict=True):
            ctypes.memmove(target, source, size)
        return SINGLE

    def register(self, memory: Array) -> bool:
        return True

    def unregister(self, memory: Array) -> None:
        pass


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PAST = _Past()
