"""Copies of blocks between an arena and a device's pool, beside one copy of pinned memory.

Tests use the host's memory as the device.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng

from kvray.config import format_size
from kvray.engine.device.gpu import DevicePool
from kvray.engine.device.pool import Load
from kvray.engine.model.cache_layout import LayerRange, Part, Region
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.report import Row, copy_row
from kvray.lab.bench.runner import TOKENS_PER_BLOCK, Duration, Pair, measure, reserve_all, timed
from kvray.store import Arena
from kvray.store.arena.tables import Array

_PRODUCT_SIZE = 8192
_PRODUCTS_MAX = 1000
_WARM_UP = 8
NUM_LAYERS = 32
_SLOWEST_BYTES_S = 10e9
"""The device is kept busy for as long as copies of this speed would take."""
_GROWTH_S = 5.0
"""How long to wait for more of the arena to be registered."""


class GpuDevice:
    """A device, such as "cuda:0" or "cpu", with a stream that stands for the engine's.

    Raises:
        ConfigError: there is no GPU that torch can use.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu and not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} finds no NVIDIA GPU here; run this where"
                " torch.cuda.is_available() is true."
            )
        self.stream = self.make_stream()
        self._beside = self.make_stream()
        self._product_s = 0.0
        self._matrix: torch.Tensor | None = None

    def make_stream(self) -> Any:
        """Return a new stream; None on the host."""
        return torch.cuda.Stream(self.device) if self.is_gpu else None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which kernels go to `stream`."""
        return torch.cuda.stream(stream) if self.is_gpu else contextlib.nullcontext()

    def finish(self) -> None:
        """Wait, without sleeping, for all work of the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], Any]) -> Duration:
        """Time `work`, with the device idle before it; it returns when its work is done."""
        self.finish()
        return timed(work)

    @contextlib.contextmanager
    def multiplying(self, seconds: float) -> Iterator[None]:
        """Have the device multiply matrices beside the body, for `seconds` at least."""
        if self._matrix is None:
            size = _PRODUCT_SIZE if self.is_gpu else 8
            kind = torch.bfloat16 if self.is_gpu else torch.float32
            self._matrix = torch.randn(size, size, device=self.device, dtype=kind)
            self._multiply(_WARM_UP)
            self._product_s = self.time(self._multiply_and_wait).seconds / _WARM_UP
        self._multiply(min(_PRODUCTS_MAX, 1 + int(seconds / self._product_s)))
        try:
            yield
        finally:
            self.finish()

    def _multiply_and_wait(self) -> None:
        self._multiply(_WARM_UP)
        self.finish()

    def _multiply(self, count: int) -> None:
        assert self._matrix is not None
        with self.on(self._beside):
            for _ in range(count):
                torch.mm(self._matrix, self._matrix)


_KINDS = tuple(itertools.product((False, True), (False, True), (True, False)))
"""Whether the device is busy, whether pages are a run, whether blocks are loaded."""


def open_pool(pages: torch.Tensor, arena: Arena, num_layers: int) -> tuple[DevicePool, Part]:
    """Return a pool of pages, and its part, once the arena's memory is registered if it can be.

    Args:
        pages: bytes [num_pages, block_bytes], in which layers lie one after the other.
        arena: copies go to it and come from it.
        num_layers: layers of each page.
    """
    share = pages.shape[1] // num_layers
    steps = tuple(LayerRange((one,), one * share, (one + 1) * share) for one in range(num_layers))
    region = Region(pages=pages, steps=steps)
    part = Part(
        index=0, num_ranks=1, group=0, regions=(region,), window_blocks=None, is_stored_here=True
    )
    pool = DevicePool([part], num_layers=num_layers, has_hooks=True)
    pool.attend(arena)
    before, grown = -1, time.monotonic()
    while (now := pool.registered_bytes(arena)) < len(arena.tables.data):
        if now != before:
            before, grown = now, time.monotonic()
        elif time.monotonic() - grown > _GROWTH_S:
            break  # copies are slower then, and the report says so
        time.sleep(0.01)
    return pool, part


class BlockCopies:
    """Blocks of one size, in an arena and in a pool of twice as many pages.

    Raises:
        KVRayError: the arena has no room.
    """

    def __init__(
        self, device: GpuDevice, arena: Arena, *, num_blocks: int, block_bytes: int
    ) -> None:
        self._device = device
        self._arena = arena
        self._num_bytes = num_blocks * block_bytes
        tokens, seed = np.arange(num_blocks * TOKENS_PER_BLOCK), request_seed(b"kvray bench gpu")
        keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=seed)
        self._reservation = reserve_all(arena, keys, block_bytes=block_bytes)
        self._slots: Array = self._reservation.slots.astype(np.int64)
        self._pages = torch.zeros(
            2 * num_blocks, block_bytes, dtype=torch.uint8, device=device.device
        )
        self.pool, self._part = open_pool(self._pages, arena, NUM_LAYERS)
        # The bare copy: torch's pinned memory, which copies fastest, and as much on the device.
        self._pinned = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=device.is_gpu)
        self._whole = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device.device)
        self._side = device.make_stream()
        self._in_order: Array = np.arange(num_blocks)
        self._scattered: Array = default_rng(0).permutation(2 * num_blocks)[:num_blocks]

    def close(self) -> None:
        """Close the pool, and give the slots back."""
        self.pool.close()
        self._arena.abort(self._reservation)

    def take(self, count: int) -> Iterator[Row]:
        """Measure loads and saves, of scattered pages and of a run, the device idle and busy."""
        self._check()
        size = format_size(self._num_bytes // len(self._slots))
        for is_busy, is_run, is_load in _KINDS:
            title = f"{'load' if is_load else 'save'}, {size} blocks"
            title += ", pages in a row" if is_run else ""
            title += ", beside matrix products" if is_busy else ""
            name = f"gpu_{'h2d' if is_load else 'd2h'}_{{}}_{size.lower()}"
            name += ("_run" if is_run else "") + ("_busy" if is_busy else "")
            pages = self._in_order if is_run else self._scattered
            pairs = self._pairs(count, pages, is_load=is_load, is_busy=is_busy)
            yield copy_row(title, name, pairs, num_bytes=self._num_bytes)

    def _pairs(self, count: int, pages: Array, *, is_load: bool, is_busy: bool) -> list[Pair]:
        def ours(_: int) -> Duration:
            return self._time(lambda: self._copy_blocks(pages, is_load=is_load), is_busy=is_busy)

        def floor(_: int) -> Duration:
            return self._time(lambda: self._copy_whole(is_load=is_load), is_busy=is_busy)

        measure(2, ours=ours, floor=floor)  # the first ones set things up
        return measure(count, ours=ours, floor=floor)

    def _time(self, work: Callable[[], None], *, is_busy: bool) -> Duration:
        if not is_busy:
            return self._device.time(work)
        with self._device.multiplying(self._num_bytes / _SLOWEST_BYTES_S):
            return timed(work)

    def _copy_blocks(self, pages: Array, *, is_load: bool) -> None:
        pool, stream = self.pool, self._device.stream
        pool.fence(stream)
        if is_load:
            ticket = pool.load(self._arena, [Load(self._part, self._slots, pages)], stream)
        else:
            mark = pool.mark(stream)
            ticket = pool.save(self._arena, self._part, pages, self._slots, mark)
        while not ticket.done():
            pass  # as torch waits for the other copy: it does not sleep

    def _copy_whole(self, *, is_load: bool) -> None:
        source, target = self._pinned, self._whole
        if not is_load:
            source, target = target, source
        with self._device.on(self._side):
            target.copy_(source, non_blocking=True)
        if self._side is not None:
            self._side.synchronize()

    def _check(self) -> None:
        """Save and load once.

        Raises:
            KVRayError: a byte is wrong, so that no speed means anything.
        """
        pages = torch.from_numpy(self._scattered).to(self._device.device)
        self._pages.random_(0, 255)
        expected = self._pages[pages].cpu()
        self._device.finish()
        self._copy_blocks(self._scattered, is_load=False)
        self._pages.zero_()
        self._device.finish()
        self._copy_blocks(self._scattered, is_load=True)
        if not torch.equal(self._pages[pages].cpu(), expected):
            raise KVRayError("Blocks came back from the arena with other bytes; report this.")
