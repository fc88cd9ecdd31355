"""A device whose streams run in any order that their events allow, a piece of a copy at a time."""

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from kvray.engine.device.cuda_device import SINGLE
from kvray.engine.device.stages import Pieces
from kvray.store.arena.tables import Array


class SimulatedDevice:
    """See `CudaDevice`; nothing happens before `run` or `drain`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._streams: list[SimulatedStream] = []

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def make_stream(self) -> "SimulatedStream":
        self._streams.append(SimulatedStream())
        return self._streams[-1]

    def record(self, stream: "SimulatedStream") -> "SimulatedEvent":
        event = SimulatedEvent(self)
        stream.queue.append(event.reach)
        return event

    def wait(self, stream: "SimulatedStream", event: "SimulatedEvent") -> None:
        stream.queue.append(event)

    def copy(
        self, pieces: Pieces, stream: "SimulatedStream", *, is_load: bool, is_registered: bool
    ) -> str:
        moves = list(zip(*(column.tolist() for column in pieces), strict=True))
        self._random.shuffle(moves)  # copies of one batch have no order
        stream.queue += [lambda move=move: ctypes.memmove(*move) for move in moves]
        return SINGLE

    def launch(self, stream: "SimulatedStream", work: Callable[[], None]) -> None:
        """Give `stream` a kernel."""
        stream.queue.append(work)

    def register(self, memory: Array) -> bool:
        return True

    def unregister(self, memory: Array) -> None:
        pass

    def run(self, steps: int) -> None:
        """Take that many steps, each of a stream that can."""
        while steps and self._step():
            steps -= 1

    def drain(self) -> None:
        """Run until there is nothing left."""
        while self._step():
            pass
        assert not any(stream.queue for stream in self._streams), "streams wait for each other"

    def _step(self) -> bool:
        able = [stream for stream in self._streams if stream.can_step()]
        if able:
            self._random.choice(able).step()
        return bool(able)


class SimulatedStream:
    """Kernels, pieces of copies and events, in order."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], Any] | SimulatedEvent] = deque()

    def can_step(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, SimulatedEvent) or first.query()

    def step(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, SimulatedEvent):
            first()


class SimulatedEvent:
    """See `Event`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._is_reached = False

    def reach(self) -> None:
        self._is_reached = True

    def query(self) -> bool:
        return self._is_reached

    def synchronize(self) -> None:
        while not self._is_reached:
            self._device.run(1)
