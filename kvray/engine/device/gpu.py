"""The engine's pool on a device: loads and saves on streams of their own, in the engine's order.

A page belongs to one request after the other, and the engine tells nobody. What keeps a copy from
meeting a page of another owner is the order of the streams:

- *The engine's stream* runs the passes. Who owns a page changes between two passes only, and the
  new owner's bytes are written by a later pass, or by a load for it. Layers may run on another
  stream than loads are asked for on; the hooks name it. On that one the engine copies a page of
  which a request reuses the first tokens, before it asks for the loads of the request's pass.
- *A load* runs after all that both streams had been given when it was asked for, so no earlier pass
  reads what it writes, and no copy of the engine's comes after it. It lands before the end of its
  pass, every layer of which waits for its own bytes. If the pass is dropped, `fence` makes the next
  one wait. So no write of ours is outstanding when a page changes hands.
- *A save* runs after its mark, the end of a pass after which its pages were complete. Before pages
  that are being saved change hands, `fence` makes the pass, and with it its loads, wait for the
  saves that were asked for. One that is asked for after that reads whatever its pages hold then:
  whether they still are the mark's is known to its caller alone (see `saver`).

So no page needs a count of its owners: a write of ours cannot come late, and for a read that does,
such a count would have to be kept by whoever gives pages away, which is the engine.

With CUDA graphs and compiled models the engine may skip its hooks, and a layer could run before its
bytes have landed. `has_hooks=False` makes the pass wait for all of them. With hooks they are
counted: a pass with loads that did not wait for each of its layers fails in `mark`.

An arena's memory is registered with a device chunk by chunk, while the arena is already in use.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvray.engine.cache_layout import CacheLayout, Part
from kvray.engine.device.cuda_device import KINDS, CudaDevice, Event
from kvray.engine.device.pool import (
    BEFORE_ALL,
    Ends,
    HostMemory,
    HostPool,
    Load,
    PartPages,
    Pieces,
    Stages,
    Ticket,
    addresses,
    concatenate,
    join,
    pieces_of,
)
from kvray.errors import LayoutMismatch, ShardUnavailable, TierError
from kvray.store import Arena
from kvray.store.arena.tables import Array, Tables

_CLOSE_S = 10.0
"""Longest wait for the copies from and to one arena, and for its memory to be unregistered."""
_CHUNK_BYTES = 128 * 2**20
"""While a chunk is registered, other calls of the device may have to wait."""

_LOOK_S = 1.0
"""How often to look whether the arena is over: an engine that is idle must not keep its memory."""


class DevicePool:
    """A rank's pages; `save` is the saver thread's, everything else the executor's."""

    is_host = False

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        num_layers: int,
        has_hooks: bool,
        device: CudaDevice | None = None,
        totals: Counter[str] | None = None,
    ) -> None:
        """`totals`: where copies are counted."""
        self.totals: Counter[str] = Counter() if totals is None else totals
        """Has `copied_bytes`, and which pieces a kernel copies."""
        self._device = device or CudaDevice(parts[0].regions[0].pages.device)
        self._stages = {
            dealt_to: Stages(
                [part for part in parts if part.num_ranks == dealt_to], num_layers=num_layers
            )
            for dealt_to in {part.num_ranks for part in parts}
        }
        self._pages = {(part.num_ranks, part.index): PartPages(part) for part in parts}
        self._has_hooks = has_hooks
        self._streams: dict[str, Any] = {}
        self._runs_on: Any = None  # the stream that a hook named last
        self._lock = threading.Lock()
        """Held while copies are asked for, never while they run."""
        self._pins: dict[int, PinnedArena] = {}  # by the address of the arena's data
        self._leaving: list[PinnedArena] = []
        self._rooms: list[Array] = []  # what `make_room` has registered
        self._saved: Event | None = None
        self._landed: Event | None = None
        self._landing: dict[int, Event] = {}  # what each layer of this pass has to wait for
        self._unwaited: set[int] = set()
        """Layers of this pass with loaded bytes that nobody has waited for yet."""

    @property
    def copied_bytes(self) -> Counter[str]:
        """Bytes by how they were copied, see `cuda_device`."""
        return Counter({kind: self.totals[kind] for kind in KINDS if self.totals[kind]})

    def attend(self, arena: Arena) -> None:
        """Register the memory of `arena` in the background, and let go of arenas that are over.

        Until a slot's memory is registered, its copies are slow and hold their thread up.
        """
        with self._lock:
            for address, pinned in list(self._pins.items()):
                if pinned.is_over:
                    pinned.leave()
                    self._leaving.append(self._pins.pop(address))
            self._leaving = [pinned for pinned in self._leaving if not pinned.has_left]
            address = arena.tables.data.ctypes.data
            if address not in self._pins:
                self._pins[address] = PinnedArena(arena, self._device, self.settle, self.totals)

    def registered_bytes(self, arena: Arena) -> int:
        """Return how many bytes of the arena's data are registered."""
        pinned = self._pins.get(arena.tables.data.ctypes.data)
        return pinned.registered_bytes if pinned else 0

    def is_ready(self, arena: Arena) -> bool:
        """Whether copies from and to the arena are as fast as they will be."""
        pinned = self._pins.get(arena.tables.data.ctypes.data)
        return pinned is not None and pinned.is_ready

    def close(self) -> None:
        """Wait for all copies and unregister every arena; nothing may follow. Twice is fine.

        A device that does not answer is left to the process's end.
        """
        with self._lock:
            leaving = [*self._leaving, *self._pins.values()]
            self._pins, self._leaving = {}, []
            for pinned in leaving:
                pinned.leave()
        for pinned in leaving:
            pinned.join(_CLOSE_S)
        events = (self._saved, self._landed)
        if all(event is None or event.query() for event in events):
            with self._device.current():
                while self._rooms:
                    self._device.unregister(self._rooms.pop())

    def fence(self, stream: Any) -> None:
        """Begin a pass that may have pages of earlier ones, or that follows one that was dropped.

        Nothing that `stream` is given after this, and no later load, runs before the saves asked
        for so far have read their pages and the loads asked for so far have landed.
        """
        self._landing, self._unwaited = {}, set()
        self._await_copies(stream)

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        """Copy leased slots to pages, layer by layer, beside what `stream` is running.

        All `loads` are of blocks that are dealt to as many ranks.
        What the engine's `stream` was given before is over before a page is written. The ticket
        tells when the leases may end. LayoutMismatch: slots or pages are not of this pool; nothing
        was copied. TierError: the device refuses; some pages may have been written.
        """
        tables = arena.tables
        ends = [
            (part, self._ends(part, addresses(tables, slots, part.block_bytes), pages))
            for part, slots, pages in loads
            if len(slots)
        ]
        return self._load(ends, self._memory_of(tables), stream)

    def make_room(self, num_bytes: int) -> Array:
        """Return memory of this process for `load_held`, registered if that can be."""
        room = np.empty(num_bytes, dtype=np.uint8)
        with self._device.current():
            if num_bytes and self._device.register(room):
                self._rooms.append(room)
        return room

    def load_held(self, rows: Array, one: Load, stream: Any) -> Ticket:
        """Do what `load` does, from rows of `make_room`'s memory, u8 [num_rows, block_bytes].

        `one.slots` are numbers of rows. The rows are read until the ticket says that it is over.
        """
        base = rows.ctypes.data
        at = base + one.slots * rows.shape[1]
        is_registered = any(room.ctypes.data == base for room in self._rooms)
        memory = HostMemory(base, rows.nbytes if is_registered else 0, max(1, rows.nbytes))
        return self._load([(one.part, self._ends(one.part, at, one.pages))], memory, stream)

    def _load(self, blocks: Sequence[tuple[Part, Ends]], memory: HostMemory, stream: Any) -> Ticket:
        device = self._device
        num_bytes = sum(part.block_bytes * ends.pages.shape[1] for part, ends in blocks)
        with device.current(), self._lock:
            side = self._stream("load")
            device.wait(side, device.record(stream))
            if self._runs_on not in (None, stream):
                device.wait(side, device.record(self._runs_on))
            self._landed = device.record(side)
            stages = self._stages[blocks[0][0].num_ranks].of(num_bytes) if blocks else ()
            for stage in stages:
                batches = [
                    pieces_of(ends, stage.by_part[part.index], is_load=True)
                    for part, ends in blocks
                    if part.index in stage.by_part
                ]
                if batches:
                    self._copy(memory, concatenate(batches), side, is_load=True)
                    self._landed = device.record(side)
                    self._landing |= dict.fromkeys(stage.layers, self._landed)
            self._await_early(stream, self._landed)
            return Ticket(self._landed)

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Have `stream` run this layer of the pass after its bytes have landed."""
        self._runs_on = stream
        event = self._landing.get(layer)
        if event is not None:
            with self._device.current():
                self._device.wait(stream, event)
            self._unwaited.discard(layer)

    def mark(self, stream: Any) -> Event:
        """Return the end of the pass, behind which `save` may read its pages.

        LayoutMismatch: a layer did not wait for its load, and may have computed on other bytes.
        """
        missed = sorted(self._unwaited)
        self._landing, self._unwaited = {}, set()
        if missed:
            self._await_copies(stream)  # the pages of what fails now are given to others
            raise LayoutMismatch(
                f"The engine ran {len(missed)} layers, {missed[0]} the first, without the hook that"
                " waits for their KV cache to be loaded, so this pass may be wrong and is failed;"
                " switch off torch.compile and CUDA graphs for prefill."
            )
        with self._device.current():
            return self._device.record(stream)

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Event) -> Ticket:
        """Copy pages to reserved slots, behind `mark` and beside whatever runs then.

        `pages` are complete at `mark`. The ticket tells when they have been read and the slots
        written. Raises as `load`.
        """
        tables, device = arena.tables, self._device
        ends = self._ends(part, addresses(tables, slots, part.block_bytes), pages)
        spans = self._pages[part.num_ranks, part.index].whole
        pieces = pieces_of(ends, spans, is_load=False)
        with device.current(), self._lock:
            side = self._stream("save")
            device.wait(side, mark)
            self._copy(self._memory_of(tables), pieces, side, is_load=False)
            self._saved = device.record(side)
            return Ticket(self._saved)

    def _ends(self, part: Part, slots: Array, pages: Array) -> Ends:
        return self._pages[part.num_ranks, part.index].ends(slots, pages)

    def _await_copies(self, stream: Any) -> None:
        """Have `stream` wait for all copies asked for so far."""
        with self._device.current(), self._lock:
            for event in (self._saved, self._landed):
                if event is not None:
                    self._device.wait(stream, event)

    def _await_early(self, stream: Any, landed: Event) -> None:
        """Have the pass wait now for what no hook of its layers will wait for."""
        early = self._landing.pop(BEFORE_ALL, None)
        if not self._has_hooks:
            early, self._landing = landed, {}
        if early is not None:
            self._device.wait(stream, early)
        self._unwaited = set(self._landing)

    def _memory_of(self, tables: Tables) -> HostMemory:
        base = tables.data.ctypes.data
        pinned = self._pins.get(base)
        if pinned is None:
            return HostMemory(base, 0, tables.geometry.slab_bytes)
        return HostMemory(base, pinned.registered_bytes, pinned.chunk_bytes)

    def _copy(self, memory: HostMemory, pieces: Pieces, side: Any, *, is_load: bool) -> None:
        """Have `side` make copies; after a TierError those that it took before have ended."""
        if not len(pieces.sizes):
            return
        in_memory = pieces.sources if is_load else pieces.targets
        end = int((in_memory + pieces.sizes).max()) - memory.base
        is_registered = end <= memory.registered_bytes
        joined = join(pieces, in_memory, base=memory.base, chunk_bytes=memory.chunk_bytes)
        try:
            how = self._device.copy(joined, side, is_load=is_load, is_registered=is_registered)
        except TierError:
            # Whoever owns slots and pages gives them to others when it hears of this.
            self._device.record(side).synchronize()
            raise
        self.totals[how] += joined.num_bytes

    def _stream(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = self._device.make_stream()
        return self._streams[name]

    def settle(self) -> None:
        """Return when the copies asked for so far have ended."""
        with self._lock:
            outstanding = (self._saved, self._landed)
        for event in outstanding:
            if event is not None:
                event.synchronize()


class PinnedArena:
    """One arena in one process; its thread keeps the mapping alive until it is unregistered."""

    def __init__(
        self,
        arena: Arena,
        device: CudaDevice,
        settle: Callable[[], None],
        totals: Counter[str],
    ) -> None:
        """Begin to register, and then to calibrate the device, of which `totals` has the figures.

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


Pool: TypeAlias = HostPool | DevicePool
"""The engine's pages; the saver's thread calls `save`, and the executor's everything else."""


def open_pool(
    layout: CacheLayout,
    parts: Sequence[Part],
    *,
    has_hooks: bool,
    totals: Counter[str] | None = None,
) -> Pool:
    """Return the pool of `layout`; `has_hooks`: the engine calls before each layer runs."""
    if layout.is_host:
        return HostPool(parts)
    num_layers = 1 + max(layer for group in layout.groups for layer in group.layers)
    return DevicePool(parts, num_layers=num_layers, has_hooks=has_hooks, totals=totals)
