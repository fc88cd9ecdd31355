"""Devices that are played in host memory, pages of layers, and arenas with reserved slots."""

import contextlib
import ctypes
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from kvray.engine.cache_layout import LayerRange, Part, Region
from kvray.engine.device.cuda_device import SINGLE
from kvray.engine.device.pool import Pieces
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.payload import offsets
from kvray.store.arena.tables import Array
from tests.unit.store.small_arena import chain


@contextlib.contextmanager
def open_arena(*, capacity: int, slab: int) -> Iterator[Arena]:
    spec = ArenaSpec(cluster_name="t", capacity=capacity, slab=slab, slot_min=4096, holders_max=8)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as directory:
        with contextlib.closing(Arena.create(Path(directory), spec, lock_wait_s=5.0)) as arena:
            arena.join("test")
            yield arena


def reserve(arena: Arena, count: int, block_bytes: int, *, seed: str = "", part: int = 0) -> Array:
    """Return slots that this process may write for the rest of the test."""
    made = arena.reserve(
        chain(count, seed=seed), parent=None, depth=0, part=part, block_bytes=block_bytes
    )
    assert made is not None
    assert len(made.slots) == count
    return made.slots.astype(np.int64)


def slot_views(arena: Arena, slots: Sequence[int] | Array, block_bytes: int) -> list[Array]:
    """Return the bytes of each slot, as views."""
    tables = arena.tables
    starts = offsets(tables, np.asarray(slots), block_bytes).tolist()
    return [tables.data[start : start + block_bytes] for start in starts]


def even_steps(num_layers: int, layer_bytes: int) -> tuple[LayerRange, ...]:
    """Return a step a layer, in the layers' order."""
    return tuple(
        LayerRange((layer,), layer * layer_bytes, (layer + 1) * layer_bytes)
        for layer in range(num_layers)
    )


def part_of(*regions: Region, index: int = 0) -> Part:
    return Part(
        index=index, num_ranks=1, group=0, regions=regions, window_blocks=None, is_stored_here=True
    )


def region(
    num_pages: int, steps: tuple[LayerRange, ...], *, gap: int = 0, device: str = "cpu"
) -> Region:
    """Return pages with `gap` bytes between rows; every byte is 0xFF, which is NaN in floats."""
    size = steps[-1].stop
    memory = torch.full((num_pages, size + gap), 0xFF, dtype=torch.uint8, device=device)
    return Region(pages=memory[:, :size], steps=steps)


class HostDevice:
    """A `CudaDevice` that has done what is asked of it when the call returns; its own event."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def make_stream(self) -> Any:
        pass

    def record(self, stream: Any) -> Any:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def copy(self, pieces: Pieces, stream: Any, *, is_load: bool, is_registered: bool) -> str:
        for target, source, size in zip(*(column.tolist() for column in pieces), strict=True):
            ctypes.memmove(target, source, size)
        return SINGLE

    def calibrate(self) -> dict[str, int]:
        return {}

    def register(self, memory: Array) -> bool:
        return True

    def unregister(self, memory: Array) -> None:
        pass


class SimulatedDevice(HostDevice):
    """A `CudaDevice` that does nothing before `run` or `drain`.

    Its streams run in any order that their events allow, a piece of a copy at a time.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._streams: list[SimulatedStream] = []

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
