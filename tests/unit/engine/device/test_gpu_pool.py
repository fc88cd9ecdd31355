"""The device's pool on tensors in host memory: every byte, every layout, and the arena's memory."""

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvray.engine.cache_layout import LayerRange, Part
from kvray.engine.device import gpu
from kvray.engine.device.gpu import DevicePool
from kvray.engine.device.pool import Load
from kvray.errors import LayoutMismatch, ShardUnavailable, TierError
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.tables import Array
from tests.kit.devices import (
    HostDevice,
    even_steps,
    open_arena,
    part_of,
    region,
    reserve,
    slot_views,
)
from tests.waiting import HANG_S, wait_for

NUM_LAYERS = 3


@pytest.fixture
def arena() -> Iterator[Arena]:
    with open_arena(capacity=2**20, slab=2**16) as made:
        yield made


def pool_of(*parts: Part, **options: object) -> DevicePool:
    options.setdefault("device", HostDevice())
    return DevicePool(parts, num_layers=NUM_LAYERS, has_hooks=True, **options)


def prepared(arena: Arena, *, count: int = 1, **options: object) -> tuple[DevicePool, Part, Array]:
    """Return a pool of one part, and slots that may be written."""
    part = one_region()
    return pool_of(part, **options), part, reserve(arena, count, part.block_bytes)


def one_region(*, num_pages: int = 8, layer_bytes: int = 40, gap: int = 0) -> Part:
    return part_of(region(num_pages, even_steps(NUM_LAYERS, layer_bytes), gap=gap))


def two_regions() -> Part:
    """Keys in layer order and, further apart, something that all layers read."""
    rest = (LayerRange((0, 1, 2), 0, 24),)
    return part_of(region(8, even_steps(NUM_LAYERS, 16), gap=8), region(8, rest, gap=104))


def full_page(*, num_pages: int = 8) -> Part:
    """Pages that fill slots, so that a run is one copy."""
    return part_of(region(num_pages, even_steps(2, 2048)))


LAYOUTS = {
    "one region": one_region(),
    "strided": one_region(gap=16),
    "two regions": two_regions(),
    "full pages": full_page(),
}


@pytest.mark.parametrize("part", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [6, 2, 7, 0]], ids=["in order", "scattered"])
def test_saved_pages_are_loaded_byte_for_byte_and_nothing_else_is_written(arena, part, pages):
    for one in part.regions:
        one.pages.copy_(torch.randint(0, 255, one.pages.shape, dtype=torch.uint8))
    before = [one.pages.clone() for one in part.regions]
    pool, slots = pool_of(part), reserve(arena, 4, part.block_bytes)
    ticket = pool.save(arena, part, np.array(pages), slots, pool.mark(None))
    ticket.wait()
    assert ticket.done()
    expected = torch.cat([one[pages] for one in before], dim=1).numpy()
    assert (np.stack(slot_views(arena, slots, part.block_bytes)) == expected).all()
    for one in part.regions:
        one.pages.fill_(0xFF)
    target = [page ^ 1 for page in pages]
    pool.load(arena, [Load(part, slots, np.array(target))], None).wait()
    for one, was in zip(part.regions, before, strict=True):
        assert (one.pages[target] == was[pages]).all()
        others = [page for page in range(8) if page not in target]
        assert (one.pages[others] == 0xFF).all()
    pool.close()


def test_loads_of_several_requests_and_parts_are_one_batch(arena):
    own, shared = one_region(), part_of(region(8, even_steps(NUM_LAYERS, 8)), index=1)
    slots = [reserve(arena, 3, one.block_bytes, part=one.index) for one in (own, shared)]
    for part, chosen in zip((own, shared), slots, strict=True):
        for value, view in enumerate(slot_views(arena, chosen, part.block_bytes)):
            view[:] = 10 * part.index + value
    pool, nothing = pool_of(own, shared), np.array([], dtype=np.int64)
    assert pool.load(arena, [], None).done()
    assert pool.save(arena, own, nothing, nothing, pool.mark(None)).done()
    loads = [
        Load(own, slots[0][:2], np.array([5, 6])),
        Load(own, slots[0][2:], np.array([0])),
        Load(shared, slots[1], np.array([1, 2, 3])),
        Load(shared, nothing, nothing),
    ]
    pool.load(arena, loads, None)
    assert own.regions[0].pages[[5, 6, 0], 0].tolist() == [0, 1, 2]
    assert shared.regions[0].pages[[1, 2, 3], -1].tolist() == [10, 11, 12]
    assert sum(pool.copied_bytes.values()) == 3 * own.block_bytes + 3 * shared.block_bytes
    pool.close()


@pytest.mark.parametrize(
    ("pages", "more_bytes", "said"),
    [
        ([-1], 0, "pages for 1 slots"),
        ([8], 0, "pages for 1 slots"),
        ([0, 1], 0, "pages for 1 slots"),
        ([0], 1, "not of one namespace"),
    ],
    ids=["bad page", "beyond", "too many", "slots of another size"],
)
def test_pages_that_are_not_there_are_refused_before_any_copy(arena, pages, more_bytes, said):
    part = one_region()
    slots = reserve(arena, 1, part.block_bytes + more_bytes)
    with pytest.raises(LayoutMismatch, match=said):
        pool_of(part).load(arena, [Load(part, slots, np.array(pages))], None)
    assert (part.regions[0].pages == 0xFF).all()


def test_a_run_of_whole_pages_is_one_copy(arena):
    part, counted = full_page(), CountingDevice()
    pool, slots = pool_of(part, device=counted), reserve(arena, 4, part.block_bytes)
    assert np.diff(slots).tolist() == [1, 1, 1]
    pool.load(arena, [Load(part, slots, np.array([2, 3, 4, 5]))], None)
    pool.load(arena, [Load(part, slots, np.array([2, 3, 5, 6]))], None)
    assert counted.num_pieces == [1, 2]


# -- the arena's memory -------------------------------------------------------------------------


def test_memory_is_registered_by_whole_slabs_and_let_go_at_the_end(arena, monkeypatch):
    monkeypatch.setattr(gpu, "_CHUNK_BYTES", 3 * 2**16 + 1)
    device = CountingDevice()
    pool, part, slots = prepared(arena, device=device)
    pool.load(arena, [Load(part, slots, np.array([0]))], None)
    pool.attend(arena)
    pool.attend(arena)
    wait_for(lambda: pool.registered_bytes(arena) == 2**20, "registering")
    pool.load(arena, [Load(part, slots, np.array([0]))], None)
    assert device.are_registered == [False, True]
    assert sorted(map(len, device.registered)) == [2**16, *[3 * 2**16] * 5]
    pool.close()
    pool.close()
    assert device.registered == []


def test_memory_that_cannot_be_registered_is_copied_all_the_same(arena):
    device = CountingDevice(chunks_max=0)
    pool, part, slots = prepared(arena, device=device)
    slot_views(arena, slots, part.block_bytes)[0][:] = 7
    pool.attend(arena)
    pool.load(arena, [Load(part, slots, np.array([0]))], None)
    assert (part.regions[0].pages[0] == 7).all()
    assert device.are_registered == [False]
    assert pool.registered_bytes(arena) == 0
    pool.close()


def test_only_slots_in_the_registered_part_count_as_such(arena, monkeypatch):
    monkeypatch.setattr(gpu, "_CHUNK_BYTES", 2**16)
    device = CountingDevice(chunks_max=1)
    part = full_page(num_pages=20)
    pool, slots = pool_of(part, device=device), reserve(arena, 20, part.block_bytes)
    pool.attend(arena)
    wait_for(lambda: pool.registered_bytes(arena) == 2**16, "registering")
    for chosen in (slots[slots < 16], slots[slots >= 16], slots):
        pool.load(arena, [Load(part, chosen, np.arange(len(chosen)))], None)
    assert device.are_registered == [True, False, False]
    pool.close()


@pytest.mark.parametrize("end", [lambda arena: ArenaOwner(arena).retire(), Arena.close])
@pytest.mark.parametrize("comes_later", [False, True])
def test_an_arena_that_is_over_is_let_go(arena, end, comes_later, monkeypatch):
    monkeypatch.setattr(gpu, "_LOOK_S", 0.01 if comes_later else HANG_S)
    device = CountingDevice()
    pool = pool_of(one_region(), device=device)
    with open_arena(capacity=2**18, slab=2**16) as before:
        path = f"{before.directory}/arena"
        pool.attend(before)
        wait_for(lambda: pool.registered_bytes(before) == 2**18, "registering")
        end(before)
        if comes_later:
            wait_for(lambda: not device.registered, "letting go")
        pool.attend(arena)
        wait_for(lambda: sum(map(len, device.registered)) == 2**20, "letting go for the next")
        before.close()
        wait_for(lambda: path not in Path("/proc/self/maps").read_text(), "unmapping")
    assert pool.registered_bytes(arena) == 2**20
    pool.close()
    assert device.registered == []


def test_a_closed_arena_is_not_copied_from(arena):
    pool, part, slots = prepared(arena)
    arena.close()
    with pytest.raises(ShardUnavailable):
        pool.load(arena, [Load(part, slots, np.array([0]))], None)


def test_a_refused_copy_is_an_error_only_when_earlier_ones_have_ended(arena):
    device = Mock(wraps=HostDevice())
    device.record.return_value = device
    device.copy.side_effect = TierError("refused")
    pool, part, slots = prepared(arena, device=device)
    device.reset_mock()
    mark = pool.mark(None)
    with pytest.raises(TierError, match="refused"):
        pool.save(arena, part, np.array([0]), slots, mark)
    called = [name for name, *_ in device.method_calls if name not in ("current", "make_stream")]
    assert called == ["record", "wait", "copy", "record", "synchronize"]


class CountingDevice(HostDevice):
    """Notes what it is asked for; registers `chunks_max` chunks."""

    def __init__(self, *, chunks_max: int = 1000) -> None:
        self.num_pieces: list[int] = []
        self.are_registered: list[bool] = []
        self.registered: list[Array] = []
        self._chunks_max = chunks_max
        self._lock = threading.Lock()

    def copy(self, pieces, stream, *, is_load: bool, is_registered: bool) -> str:  # type: ignore[no-untyped-def]
        self.num_pieces.append(len(pieces.sizes))
        self.are_registered.append(is_registered)
        return super().copy(pieces, stream, is_load=is_load, is_registered=is_registered)

    def register(self, memory: Array) -> bool:
        with self._lock:
            if len(self.registered) >= self._chunks_max:
                return False
            self.registered.append(memory)
            return True

    def unregister(self, memory: Array) -> None:
        with self._lock:
            self.registered = [one for one in self.registered if one is not memory]
