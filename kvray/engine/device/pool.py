"""The engine's pages in host memory, and what loads and saves of any pool are told by.

An arena's memory is registered with a device chunk by chunk, while the arena is already in use.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvray.engine.cache_layout import Part
from kvray.engine.device.cuda_device import CudaDevice, Event
from kvray.errors import ShardUnavailable
from kvray.store import Arena, PartRead
from kvray.store.arena.payload import Strip, runs, scatter
from kvray.store.arena.tables import Array


class Load(NamedTuple):
    """Slots of one part, and the pages of its group that they are copied into."""

    part: Part
    slots: Array
    pages: Array


class Ticket:
    """Copies that were begun; those without an event have ended when the ticket is made."""

    def __init__(self, event: Event | None = None, *, sums: Array | None = None) -> None:
        self.sums = sums  # checksums of slots that were written, if the copy made them
        self._event = event

    def done(self) -> bool:
        """Whether they have ended."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when they have ended; TierError: the device failed. Others go on meanwhile."""
        if self._event is not None:
            self._event.synchronize()


class HostPool:
    """Pages in host memory: copies are made by the calling thread, at once."""

    is_host = True

    def __init__(self, parts: Sequence[Part]) -> None:
        self._strips = {(part.num_ranks, part.index): strips_of(part) for part in parts}
        self._regions = {
            part.index: [region.pages.numpy() for region in part.regions]
            for part in parts
            if part.is_stored_here
        }

    def attend(self, arena: Arena) -> None:
        """Do nothing: copies in host memory need no preparation."""

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        arena.read_slots(
            [
                PartRead(
                    one.slots,
                    self._strips[one.part.num_ranks, one.part.index],
                    one.pages,
                    one.part.block_bytes,
                )
                for one in loads
            ]
        )
        return Ticket()

    def make_room(self, num_bytes: int) -> Array:
        """Return memory of this process for `load_held`; it is touched when it is first used."""
        return np.empty(num_bytes, dtype=np.uint8)

    def load_held(self, rows: Array, one: Load, stream: Any) -> Ticket:
        """Copy blocks from rows of `make_room`'s memory, u8 [num_rows, block_bytes], to pages.

        `one.slots` are numbers of rows.
        """
        strips = self._strips[one.part.num_ranks, one.part.index]
        scatter(_row_runs(rows, one), strips, one.pages)
        return Ticket()

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Return at once: loads end before they return."""

    def mark(self, stream: Any) -> None:
        """Return no mark: a pass on the host has ended when it returns."""

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Any) -> Ticket:
        return Ticket(sums=arena.write_slots(slots, self._regions[part.index], pages))

    def fence(self, stream: Any) -> None:
        """Return at once: no copies are under way."""

    def close(self) -> None:
        """Do nothing: the pages belong to the engine."""


def _row_runs(rows: Array, one: Load) -> Iterator[tuple[int, int, Array]]:
    breaks = (np.diff(one.slots) != 1) | (np.diff(one.pages) != 1)
    for start, stop in runs(breaks, len(one.slots)):
        first = int(one.slots[start])
        yield start, stop, rows[first : first + stop - start]


def strips_of(part: Part) -> list[Strip]:
    """Return the bytes of a part on the host, runs that are evenly apart as one strip."""
    strips: list[list[_Run]] = []
    at = 0
    for region in part.regions:
        run = _Run(region.pages, at)
        at += region.size
        if region.is_gap:
            continue
        if strips and _goes_on(strips[-1], run):
            strips[-1].append(run)
        else:
            strips.append([run])
    return list(map(_strip, strips))


class _Run(NamedTuple):
    pages: torch.Tensor  # u8 [num_pages, size]
    at: int  # where it begins in a slot

    def behind(self, other: "_Run") -> tuple[int, int]:
        """Return how many bytes it is behind another in a page, and in a slot."""
        return self.pages.data_ptr() - other.pages.data_ptr(), self.at - other.at


def _goes_on(strip: list[_Run], run: _Run) -> bool:
    last = strip[-1]
    is_alike = (
        run.pages.untyped_storage().data_ptr() == last.pages.untyped_storage().data_ptr()
        and run.pages.shape == last.pages.shape
        and run.pages.stride() == last.pages.stride()
        and run.pages.data_ptr() > last.pages.data_ptr()
    )
    return is_alike and (len(strip) == 1 or run.behind(last) == last.behind(strip[-2]))


def _strip(runs: list[_Run]) -> Strip:
    first, (num_pages, size) = runs[0], runs[0].pages.shape
    in_page, in_slot = runs[1].behind(first) if len(runs) > 1 else (size, size)
    pages = first.pages.as_strided(
        (num_pages, len(runs), size), (first.pages.stride(0), in_page, 1)
    )
    return Strip(pages.numpy(), first.at, in_slot)


_CHUNK_BYTES = 128 * 2**20
"""While a chunk is registered, other calls of the device may have to wait."""

_LOOK_S = 1.0
"""How often to look whether the arena is over: an engine that is idle must not keep its memory."""


class PinnedArena:
    """One arena in one process; its thread keeps the mapping alive until it is unregistered."""

    def __init__(
        self,
        arena: Arena,
        device: CudaDevice,
        settle: Callable[[], None],
        totals: Counter[str],
    ) -> None:
        """Begin to register, and then to calibrate the device, which `totals` tells of.

        `settle` returns when copies asked for before have ended.
        """
        tables = arena.tables
        self._data: Array | None = tables.data
        slab = tables.geometry.slab_bytes
        self.chunk_bytes = max(1, _CHUNK_BYTES // slab) * slab
        """A chunk has whole slabs, so no slot lies in two."""
        self._arena = arena
        self._device = device
        self._settle = settle
        self._totals = totals
        self._registered_bytes = 0
        self.is_ready = False
        """Whether all is registered that can be, and the device is calibrated."""
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
            if not self._leaving.is_set():
                for name, value in self._device.calibrate().items():
                    self._totals[name] = value
        self.is_ready = True
        while not self._leaving.wait(_LOOK_S):
            if self.is_over:
                self._leaving.set()
        self._settle()
        with self._device.current():
            for chunk in chunks:
                self._device.unregister(chunk)
        self._data = None
