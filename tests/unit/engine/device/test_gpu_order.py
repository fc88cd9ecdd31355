"""Every order in which a device may run what the pool asks for gives the right bytes.

An engine of three layers runs passes over three pages that change hands all the time. Its kernels
check what they read when they run, which a simulated device puts off as long as it likes. Layers
run on a stream of their own, and with partial reuse pages are copied there before loads are asked
for, which may go over the copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.engine.device import pool as pool_module
from kvray.engine.device.gpu import DevicePool
from kvray.engine.device.pool import Load, Ticket
from kvray.errors import LayoutMismatch
from kvray.store import Arena
from kvray.store.arena.tables import Array
from tests.examples import examples
from tests.kit.devices import (
    SimulatedDevice,
    even_steps,
    open_arena,
    part_of,
    region,
    reserve,
    slot_views,
)

NUM_LAYERS, LAYER_BYTES, NUM_PAGES = 3, 2, 3
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES
STORED, SAVED = slice(0, 4), slice(4, 16)
"""Slots that are loaded from, and slots that are saved to."""


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with open_arena(capacity=2**18, slab=2**16) as made:
        yield made


@pytest.fixture(scope="module")
def slots(arena: Arena) -> Array:
    return reserve(arena, 16, BLOCK_BYTES)


@pytest.fixture(scope="module", autouse=True)
def _fine_stages() -> Iterator[None]:
    """Have every layer be a stage, however few bytes it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "PIECE_BYTES", 1)
        patch.setattr(pool_module, "STAGE_BYTES", 1)
        yield


@dataclass
class Save:
    """Blocks of one pass, as the saver's thread has them."""

    page: int
    content: int
    mark: object
    slot: int = -1
    ticket: Any = None


@dataclass
class Engine:
    """Passes over pages; page p holds `owners[p]`, or nothing that anybody needs."""

    arena: Arena
    slots: Array
    random: Random
    has_hooks: bool
    is_partial: bool = False
    owners: dict[int, int] = field(default_factory=dict)
    waiting: list[Save] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    contents: int = 100
    was_dropped: bool = False

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(self.random)
        self.region = region(NUM_PAGES, even_steps(NUM_LAYERS, LAYER_BYTES), gap=1)
        self.part = part_of(self.region)
        self.stream, self.layers = self.device.make_stream(), self.device.make_stream()
        self.pool = DevicePool(
            [self.part], num_layers=NUM_LAYERS, has_hooks=self.has_hooks, device=self.device
        )
        self.free_slots = self.slots[SAVED].tolist()
        for content, view in enumerate(slot_views(self.arena, self.slots[STORED], BLOCK_BYTES)):
            view[:] = content

    def run_pass(self) -> None:
        """Fence, load, run the layers, and save: as a worker does it for an engine."""
        gone = [self.owners.pop(page) for page in self._some(list(self.owners))]
        free = [page for page in range(NUM_PAGES) if page not in self.owners]
        copied = self._copy_pages(free) if self.is_partial else {}
        self._begin_saves()
        if self.was_dropped or any(content > 100 for content in gone):
            self.waiting.clear()  # what the saver did not begin in time is given up
            self.pool.fence(self.stream)
            self.was_dropped = False
        loaded = {page: self.random.randrange(4) for page in self._some(free)}
        if loaded:
            ticket = self.load(loaded)
            self.device.run(self.random.randrange(8))
        if loaded and self.random.random() < 0.2:  # the batch became empty
            self.was_dropped = True
            if self.is_partial:
                ticket.wait()
            return
        self.owners |= copied | loaded
        free = [page for page in free if page not in copied]
        computed = {}
        for page in self._some([page for page in free if page not in loaded]):
            self.contents += 1
            computed[page] = self.contents
        skipped = self._run_layers(computed)
        if loaded and skipped and self.has_hooks:
            with pytest.raises(LayoutMismatch):
                self.pool.mark(self.stream)
            for page in loaded:
                del self.owners[page]
            return
        self.owners |= computed
        mark = self.pool.mark(self.stream)
        self.waiting += [Save(page, content, mark) for page, content in computed.items()]
        self._begin_saves()
        if self.is_partial:
            self.waiting.clear()
            self.pool.settle()

    def _copy_pages(self, free: list[int]) -> dict[int, int]:
        """Copy pages that are still read into some that are free; return what those hold then."""
        sources = list(self.owners)
        chosen = {page: self.random.choice(sources) for page in self._some(free)} if sources else {}
        pages = self.region.pages
        for page, source in chosen.items():
            self.device.launch(self.layers, partial(_copy_page, pages, source, page))
        return {page: self.owners[source] for page, source in chosen.items()}

    def _run_layers(self, computed: dict[int, int]) -> bool:
        """Launch the layers; return whether one was launched without its hook, and read nothing."""
        skipped = self.random.randrange(NUM_LAYERS) if self.random.random() < 0.3 else None
        self.device.wait(self.layers, self.device.record(self.stream))
        for layer in range(NUM_LAYERS):
            read = {} if layer == skipped else dict(self.owners)
            if self.has_hooks and layer != skipped:
                self.pool.wait_for_layer(layer, self.layers)
            self.device.launch(self.layers, partial(self._run_layer, layer, read, computed))
            self.device.run(self.random.randrange(4))
        self.device.wait(self.stream, self.device.record(self.layers))
        return skipped is not None

    def finish(self) -> None:
        self.device.drain()
        for save in self.saves:
            assert save.ticket.done()
            self._check(save)

    def load(self, loaded: dict[int, int]) -> Ticket:
        """Ask for the content of pages."""
        chosen = self.slots[STORED][list(loaded.values())]
        loads = [Load(self.part, chosen, np.array(list(loaded)))]
        return self.pool.load(self.arena, loads, self.stream)

    def _run_layer(self, layer: int, read: dict[int, int], written: dict[int, int]) -> None:
        """A kernel: reads what its request has, and writes what it computes."""
        where = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
        for page, content in read.items():
            assert (self.region.pages[page, where] == content).all(), "read before it was there"
        for page, content in written.items():
            self.region.pages[page, where] = content

    def _begin_saves(self) -> None:
        """Do what the saver's thread gets done until now."""
        for save in self._some(list(self.waiting)):
            self.waiting.remove(save)
            if not self.free_slots:
                return
            save.slot = self.free_slots.pop()
            save.ticket = self.pool.save(
                self.arena, self.part, np.array([save.page]), np.array([save.slot]), save.mark
            )
            self.saves.append(save)
            self.device.run(self.random.randrange(4))
        for save in [one for one in self.saves if one.ticket.done()]:
            self._check(save)
            self.saves.remove(save)
            self.free_slots.append(save.slot)

    def _check(self, save: Save) -> None:
        (view,) = slot_views(self.arena, [save.slot], BLOCK_BYTES)
        assert (view == save.content).all(), "saved after its page changed hands"

    def _some(self, of: list) -> list:
        return [one for one in of if self.random.random() < 0.5]


def _copy_page(pages: Any, source: int, target: int) -> None:
    pages[target] = pages[source]


HOOKS = st.sampled_from([(False, False), (True, False), (True, True)])
"""Whether there are hooks, and partial reuse."""


@settings(max_examples=examples(300))
@given(random=st.integers(0, 2**32).map(Random), hooks=HOOKS)
def test_no_order_of_the_streams_gives_a_wrong_byte(arena, slots, random, hooks):
    engine = Engine(arena, slots, random, *hooks)
    for _ in range(random.randrange(1, 16)):
        engine.run_pass()
    engine.finish()
    engine.pool.close()


def test_layers_wait_for_their_own_bytes_and_not_for_later_ones(arena, slots):
    engine = Engine(arena, slots, Random(0), has_hooks=True)
    engine.pool.fence(engine.stream)
    ran = []
    engine.load({0: 0, 1: 1})
    for layer in range(NUM_LAYERS):
        engine.pool.wait_for_layer(layer, engine.stream)
        engine.device.launch(engine.stream, partial(ran.append, layer))
    side = engine.device._streams[2]
    engine.stream.step()  # the point that the load begins at
    while not ran:
        side.step()
        while engine.stream.can_step():
            engine.stream.step()
    assert ran == [0]
    assert engine.region.pages[:2, :LAYER_BYTES].tolist() == [[0, 0], [1, 1]]
    assert (engine.region.pages[:2, LAYER_BYTES:] == 0xFF).all()
    engine.device.drain()
    engine.pool.mark(engine.stream)


def test_a_load_of_a_failed_pass_does_not_land_in_the_next(arena, slots):
    engine = Engine(arena, slots, Random(0), has_hooks=True)
    engine.load({0: 0})
    with pytest.raises(LayoutMismatch, match=r"3 layers, 0 the first.*torch\.compile"):
        engine.pool.mark(engine.stream)
    engine.device.launch(engine.stream, lambda: engine.region.pages.fill_(7))
    while engine.stream.can_step():
        engine.stream.step()
    engine.device.drain()
    assert (engine.region.pages == 7).all()
