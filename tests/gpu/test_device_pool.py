"""The pool on a real GPU: bytes, orders and memory. Pages that were not loaded are NaN."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvray.engine.cache_layout import (
    CacheLayout,
    Group,
    LayerRange,
    Part,
    Region,
    resliced_parts,
)
from kvray.engine.device.cuda_device import BATCHED, GATHERED, PAGEABLE, SINGLE, CudaDevice
from kvray.engine.device.gather import Below
from kvray.engine.device.gpu import DevicePool
from kvray.engine.device.pool import Load
from kvray.store import Arena
from kvray.store.arena.tables import Array
from tests.kit.devices import (
    even_steps,
    open_arena,
    part_of,
    region,
    reserve,
    slot_views,
)
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_LAYERS, NUM_PAGES = 32, 24
SMALL, LARGE = 128 * 2**10, 4 * 2**20
CAPACITY, SLAB = 2**28, 2**24


@pytest.fixture
def arena() -> Iterator[Arena]:
    with open_arena(capacity=CAPACITY, slab=SLAB) as made:
        yield made


@pytest.fixture
def make_pool(arena: Arena) -> Iterator[Callable[..., DevicePool]]:
    """Make pools that end with the test; by default their arena is registered."""
    pools: list[DevicePool] = []

    def make(
        *parts: Part,
        is_registered: bool = True,
        has_batches: bool = True,
        kernel_max_bytes: int = 0,
    ) -> DevicePool:
        device = CudaDevice(parts[0].regions[0].pages.device)
        device._below, device._is_calibrated = Below(kernel_max_bytes, kernel_max_bytes), True
        if not has_batches:
            device._driver()
            device._batches = False
        pool = DevicePool(parts, num_layers=NUM_LAYERS, has_hooks=True, device=device)
        pools.append(pool)
        if is_registered:
            pool.attend(arena)
            wait_for(lambda: pool.registered_bytes(arena) == CAPACITY)
        return pool

    yield make
    for pool in pools:
        pool.close()


def pages_of(block_bytes: int, *, gap: int = 0) -> Region:
    steps = even_steps(NUM_LAYERS, block_bytes // NUM_LAYERS)
    return region(NUM_PAGES, steps, gap=gap, device="cuda")


def random_bytes(pages: torch.Tensor) -> None:
    pages.copy_(torch.randint(0, 255, pages.shape, dtype=torch.uint8, device=pages.device))


WAYS = {
    BATCHED: {},
    SINGLE: {"has_batches": False},
    GATHERED: {"kernel_max_bytes": LARGE},
    PAGEABLE: {"is_registered": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_bytes", [SMALL, LARGE], ids=["128KiB", "4MiB"])
@pytest.mark.parametrize("gap", [0, 512], ids=["dense", "strided"])
@pytest.mark.parametrize("order", ["row", "scattered"])
def test_bytes_come_back_and_no_other_page_is_touched(
    arena, make_pool, way, block_bytes, gap, order
):
    part = part_of(pages_of(block_bytes, gap=gap))
    pages = part.regions[0].pages
    random_bytes(pages)
    saved = list(range(8)) if order == "row" else [3, 17, 0, 9, 22, 5, 11, 1]
    expected = pages[saved].cpu()
    pool, slots = make_pool(part, **WAYS[way]), reserve(arena, 8, block_bytes)
    stream = torch.cuda.current_stream()
    pool.save(arena, part, np.array(saved), slots, pool.mark(stream)).wait()
    assert (np.stack(slot_views(arena, slots, block_bytes)) == expected.numpy()).all()
    pages.fill_(0xFF)
    loaded = list(range(10, 18)) if order == "row" else saved[::-1]
    pool.fence(stream)
    ticket = pool.load(arena, [Load(part, slots, np.array(loaded))], stream)
    ticket.wait()
    assert ticket.done()
    assert torch.equal(pages[loaded].cpu(), expected)
    others = [page for page in range(NUM_PAGES) if page not in loaded]
    assert (pages[others] == 0xFF).all()
    if order == "scattered":
        assert set(pool.copied_bytes) == {way}


def test_regions_and_parts_land_where_they_belong(arena, make_pool):
    whole = (LayerRange(tuple(range(NUM_LAYERS)), 0, 4096),)
    own = part_of(pages_of(SMALL, gap=64), region(NUM_PAGES, whole, device="cuda"))
    shared = part_of(pages_of(SMALL), index=1)
    pool = make_pool(own, shared)
    slots = {part.index: filled(arena, part, 4) for part in (own, shared)}
    stream = torch.cuda.current_stream()
    pages = np.array([20, 3, 7, 8])
    pool.load(
        arena, [Load(part, slots[part.index], pages) for part in (own, shared)], stream
    ).wait()
    for part in (own, shared):
        found = torch.cat([one.pages[pages].cpu() for one in part.regions], dim=1)
        assert (
            found.numpy() == np.stack(slot_views(arena, slots[part.index], part.block_bytes))
        ).all()


def filled(arena: Arena, part: Part, count: int) -> Array:
    """Return slots of random bytes."""
    slots = reserve(arena, count, part.block_bytes, part=part.index)
    rng = np.random.default_rng(part.index)
    for view in slot_views(arena, slots, part.block_bytes):
        view[:] = rng.integers(0, 255, len(view), dtype=np.uint8)
    return slots


# -- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [SMALL, LARGE], ids=["128KiB", "4MiB"])
def test_every_layer_finds_its_bytes_when_it_runs(arena, make_pool, block_bytes):
    part = part_of(pages_of(block_bytes))
    pool, slots = make_pool(part), filled(arena, part, 16)
    pages = np.random.default_rng(0).permutation(NUM_PAGES)[:16]
    rows, on_device = part.regions[0].pages, torch.from_numpy(pages).cuda()
    expected = torch.from_numpy(np.stack(slot_views(arena, slots, block_bytes))).cuda()
    is_right = torch.zeros(NUM_LAYERS, dtype=torch.bool, device="cuda")
    share, stream = block_bytes // NUM_LAYERS, torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            pool.fence(stream)
            rows.fill_(0xFF)
            pool.load(arena, [Load(part, slots, pages)], stream)
            for layer in range(NUM_LAYERS):
                pool.wait_for_layer(layer, stream)
                where = slice(layer * share, (layer + 1) * share)
                is_right[layer] = (rows[on_device, where] == expected[:, where]).all()
            pool.mark(stream)
        torch.cuda.synchronize()
        assert is_right.all()


def test_a_load_waits_for_earlier_passes(arena, make_pool):
    part = part_of(pages_of(SMALL))
    pool, slots = make_pool(part), filled(arena, part, 4)
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(100_000_000)
    part.regions[0].pages.fill_(1)
    pool.load(arena, [Load(part, slots, np.arange(4))], stream).wait()
    found = part.regions[0].pages[:4].cpu().numpy()
    assert (found == np.stack(slot_views(arena, slots, SMALL))).all()


def test_a_pass_after_a_fence_changes_no_page_that_is_being_saved(arena, make_pool):
    part = part_of(pages_of(LARGE))
    pool, slots = make_pool(part), reserve(arena, 8, LARGE)
    rows, stream = part.regions[0].pages, torch.cuda.current_stream()
    for value in range(20):
        rows.fill_(value)
        ticket = pool.save(arena, part, np.arange(8), slots, pool.mark(stream))
        pool.fence(stream)
        rows.fill_(0xFF)
        ticket.wait()
        assert (np.stack(slot_views(arena, slots, LARGE)) == value).all()


def test_a_load_of_a_dropped_pass_does_not_land_in_the_next(arena, make_pool):
    part = part_of(pages_of(LARGE))
    pool, slots = make_pool(part), filled(arena, part, 8)
    rows, stream = part.regions[0].pages, torch.cuda.current_stream()
    for value in range(20):
        pool.fence(stream)
        pool.load(arena, [Load(part, slots, np.arange(8))], stream)
        pool.fence(stream)
        rows.fill_(value)
        torch.cuda.synchronize()
        assert (rows == value).all()


def test_copies_run_beside_kernels(arena, make_pool):
    part = part_of(pages_of(LARGE))
    pool, slots = make_pool(part), filled(arena, part, 8)
    stream, beside = torch.cuda.Stream(), torch.cuda.Stream()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    load = [Load(part, slots, np.arange(8))]
    pool.load(arena, load, stream).wait()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        for _ in range(300):
            torch.mm(matrix, matrix)
        multiplied = torch.cuda.Event()
        multiplied.record()
    pool.fence(stream)
    pool.load(arena, load, stream).wait()
    pool.fence(stream)
    pool.save(arena, part, np.arange(8), slots, pool.mark(stream)).wait()
    assert not multiplied.query()
    torch.cuda.synchronize()


def test_a_thread_that_never_used_the_gpu_saves_and_ends_no_capture_of_a_graph(arena, make_pool):
    part = part_of(pages_of(SMALL))
    random_bytes(part.regions[0].pages)
    pool, slots = make_pool(part), reserve(arena, 4, SMALL)
    mark, is_over = pool.mark(torch.cuda.current_stream()), threading.Event()
    num_saves, numbers = 0, torch.ones(1024, device="cuda")

    def save() -> None:
        nonlocal num_saves
        while not is_over.is_set():
            pool.save(arena, part, np.arange(4), slots, mark).wait()
            with pool._device.current():
                room = np.empty(2**20, dtype=np.uint8)
                assert pool._device.register(room)
                pool._device.unregister(room)
            num_saves += 1

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(20):
            before, graph = num_saves, torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = numbers * 2
                wait_for(lambda before=before: num_saves > before)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert (doubled == 2).all()
    finally:
        is_over.set()
        thread.join()
    found = np.stack(slot_views(arena, slots, SMALL))
    assert (found == part.regions[0].pages[:4].cpu().numpy()).all()


# -- the arena's memory -------------------------------------------------------------------------


def test_two_pools_of_a_process_share_an_arena_and_each_lets_go_of_its_own(arena, make_pool):
    part = part_of(pages_of(SMALL))
    slots = filled(arena, part, 4)
    for _ in range(2):
        first, second = make_pool(part), make_pool(part)
        second.close()
        scattered = [Load(part, slots, np.array([5, 1, 8, 3]))]
        first.load(arena, scattered, torch.cuda.current_stream()).wait()
        assert set(first.copied_bytes) == {BATCHED}
        first.close()


def test_making_a_pool_makes_no_call_to_cuda():
    code = """
import torch
from kvray.engine.device.cuda_device import CudaDevice
from kvray.engine.device.gather import Below
from kvray.engine.device.gpu import DevicePool
from tests.kit.devices import even_steps, part_of, region
part, device = part_of(region(1, even_steps(1, 8))), CudaDevice(torch.device("cuda:0"))
DevicePool([part], num_layers=1, has_hooks=True, device=device)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_card_finds_out_which_pieces_a_kernel_copies_faster():
    device = CudaDevice(torch.device("cuda:0"))
    with device.current():
        found = device.calibrate()
    print(found)
    assert set(found) == {"kernel_load_max_bytes", "kernel_save_max_bytes"}


@pytest.mark.parametrize("kernel_max_bytes", [0, LARGE])
@pytest.mark.parametrize(
    ("rank", "size", "stored_by"), [(1, 2, 1), (0, 1, 2), (3, 4, 1), (0, 1, 4)]
)
def test_heads_are_gathered_from_blocks_of_other_sizes(
    arena, make_pool, rank, size, stored_by, kernel_max_bytes
):
    planes, heads, head_bytes = 2 * NUM_LAYERS, 8, 8192
    whole = np.random.default_rng(5).integers(0, 256, (4, planes, heads, head_bytes), np.uint8)

    def share(of: int, among: int) -> Array:
        count = heads // among
        mine = np.ascontiguousarray(whole[:, :, of * count : (of + 1) * count])
        return mine.reshape(len(whole), -1)

    expected = share(rank, size)
    memory = torch.full((NUM_PAGES, expected.shape[1]), 0xFF, dtype=torch.uint8, device="cuda")
    steps = even_steps(NUM_LAYERS, expected.shape[1] // NUM_LAYERS)
    own = Region(pages=memory, steps=steps, num_planes=planes)
    layout = CacheLayout(
        groups=(Group(layers=tuple(range(NUM_LAYERS)), window=None, own=(own,)),),
        dtype="float16",
        kv_factor=2,
        tokens_per_block=32,
        is_flat=True,
    )
    parts = resliced_parts(layout, rank, size, stored_by, 32)
    pool = make_pool(*parts, kernel_max_bytes=kernel_max_bytes)
    loads, pages = [], np.array([7, 2, 3, 19])
    for part in parts:
        slots = reserve(arena, 4, part.block_bytes, seed=f"{part.index}", part=part.index)
        for view, block in zip(
            slot_views(arena, slots, part.block_bytes), share(part.index, stored_by), strict=True
        ):
            view[:] = block
        loads.append(Load(part, slots, pages))
    pool.load(arena, loads, torch.cuda.current_stream()).wait()
    found = memory.cpu().numpy()
    assert (found[pages] == expected).all()
    assert (np.delete(found, pages, axis=0) == 0xFF).all()
