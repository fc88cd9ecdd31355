"""Copies of blocks between an arena and a device's pool, beside one copy of pinned memory."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng

from kvray.config import format_size
from kvray.engine.cache_layout import CacheLayout, Group, LayerRange, Part, Region, resliced_parts
from kvray.engine.device.gpu import DevicePool, open_pool
from kvray.engine.device.pool import Load, Ticket
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.report import Row, copy_row, time_row
from kvray.lab.runner import (
    TOKENS_PER_BLOCK,
    Duration,
    Pair,
    is_soon,
    measure,
    reserve_all,
    time_ratio,
    timed,
)
from kvray.store import Arena, Reservation
from kvray.store.arena.payload import offsets
from kvray.store.arena.tables import Array

_PRODUCT_SIZE = 8192
_PRODUCTS_MAX = 1000
_WARM_UP = 8
NUM_LAYERS = 32
RANKS = 4
_SLOWEST_BYTES_S = 10e9
"""The device is kept busy for as long as copies of this speed would take."""
_READY_S = 60.0


class GpuDevice:
    """A device, such as "cuda:0" or "cpu", with a stream that stands for the engine's.

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


def wait_until_ready(pool: object, arena: Arena) -> None:
    """Return once copies of `pool` are as fast as they will be; KVRayError: they never are."""
    if isinstance(pool, DevicePool) and not is_soon(lambda: pool.is_ready(arena), _READY_S):
        raise KVRayError(
            f"The arena was not registered with the GPU within {_READY_S:.0f} s; run it again"
            " on an idle machine, or with --quick."
        )


class BlockCopies:
    """Blocks of one size, in an arena and in a pool of twice as many pages.

    The pool is that of a rank that reads its own blocks and, of four ranks, those of one that had
    all heads, in which a quarter of each plane is its own. KVRayError: the arena has no room.
    """

    def __init__(
        self, device: GpuDevice, arena: Arena, *, num_blocks: int, block_bytes: int
    ) -> None:
        self._device = device
        self._arena = arena
        self._num_blocks = num_blocks
        self._num_bytes = num_blocks * block_bytes
        self._pages = torch.zeros(
            2 * num_blocks, block_bytes, dtype=torch.uint8, device=device.device
        )
        share = block_bytes // NUM_LAYERS
        steps = tuple(
            LayerRange((one,), one * share, (one + 1) * share) for one in range(NUM_LAYERS)
        )
        layout = CacheLayout(
            groups=(
                Group(
                    layers=tuple(range(NUM_LAYERS)),
                    window=None,
                    own=(Region(pages=self._pages, steps=steps, num_planes=2 * NUM_LAYERS),),
                ),
            ),
            dtype="bfloat16",
            kv_factor=2,
            tokens_per_block=TOKENS_PER_BLOCK,
            is_flat=True,
        )
        (self._part,) = layout.parts(0, RANKS, TOKENS_PER_BLOCK)
        (self._resliced,) = resliced_parts(layout, 0, RANKS, 1, TOKENS_PER_BLOCK)
        self._reservations: list[Reservation] = []
        self._slots = self._reserve(b"own", block_bytes)
        self.pool = open_pool(layout, [self._part, self._resliced], has_hooks=True)
        self.pool.attend(arena)
        wait_until_ready(self.pool, arena)
        # The bare copy: torch's pinned memory, which copies fastest, and as much on the device.
        self._pinned = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=device.is_gpu)
        self._whole = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device.device)
        self._side = device.make_stream()
        self._in_order: Array = np.arange(num_blocks)
        self._scattered: Array = default_rng(0).permutation(2 * num_blocks)[:num_blocks]

    @property
    def copied_bytes(self) -> Counter[str]:
        """Bytes by how the device copied them."""
        return self.pool.copied_bytes if isinstance(self.pool, DevicePool) else Counter()

    def close(self) -> None:
        """Close the pool, and give the slots back."""
        self.pool.close()
        for one in self._reservations:
            self._arena.abort(one)

    def take(self, count: int) -> Iterator[Row]:
        """Measure loads and saves, of scattered pages and of a run, the device idle and busy."""
        self._check()
        size = format_size(self._num_bytes // self._num_blocks)
        for is_busy, is_run, is_load in _KINDS:
            title = f"{'load' if is_load else 'save'}, {size} blocks"
            title += ", pages in a row" if is_run else ""
            title += ", beside matrix products" if is_busy else ""
            name = f"gpu_{'h2d' if is_load else 'd2h'}_{{}}_{size.lower()}"
            name += ("_run" if is_run else "") + ("_busy" if is_busy else "")
            pages = self._in_order if is_run else self._scattered
            work = partial(self._load if is_load else self._save, pages)
            pairs = self._pairs(
                count, work, partial(self._copy_whole, is_load=is_load), is_busy=is_busy
            )
            yield copy_row(title, name, pairs, num_bytes=self._num_bytes)

    def take_resliced(self, count: int) -> Iterator[Row]:
        """Measure loads of this rank's heads out of blocks with those of four ranks.

        They are compared with one copy of pinned memory, and with loads of the rank's own blocks.
        """
        block_bytes = RANKS * self._part.block_bytes
        slots = self._reserve(b"whole", block_bytes)
        self._check_resliced(slots)
        piece = format_size(self._part.block_bytes // (2 * NUM_LAYERS))
        resliced = partial(self._load, self._scattered, part=self._resliced, slots=slots)
        plain = partial(self._load, self._scattered)
        title = f"load, {format_size(block_bytes)} blocks of one rank for one of four"
        pairs = self._pairs(count, resliced, partial(self._copy_whole, is_load=True))
        name = "gpu_h2d_{}_resliced"
        yield copy_row(f"{title}, {piece} pieces", name, pairs, num_bytes=self._num_bytes)
        pairs = self._pairs(count, resliced, plain)
        names = ("gpu_resliced_ms", "gpu_plain_ms", "gpu_resliced_over_plain")
        title = "    beside loads of its own blocks"
        yield time_row(title, names, pairs, ratio=time_ratio(pairs))

    def _reserve(self, name: bytes, block_bytes: int) -> Array:
        tokens = np.arange(self._num_blocks * TOKENS_PER_BLOCK)
        seed = request_seed(b"kvray bench gpu " + name)
        keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=seed)
        made = reserve_all(self._arena, keys, block_bytes=block_bytes)
        self._reservations.append(made)
        slots: Array = made.slots.astype(np.int64)
        return slots

    def _pairs(
        self,
        count: int,
        work: Callable[[], None],
        bare: Callable[[], None],
        *,
        is_busy: bool = False,
    ) -> list[Pair]:
        ours, floor = (partial(self._time, one, is_busy) for one in (work, bare))
        measure(2, ours=ours, floor=floor)  # the first ones set things up
        return measure(count, ours=ours, floor=floor)

    def _time(self, work: Callable[[], None], is_busy: bool, _: int) -> Duration:
        if not is_busy:
            return self._device.time(work)
        with self._device.multiplying(self._num_bytes / _SLOWEST_BYTES_S):
            return timed(work)

    def _load(self, pages: Array, *, part: Part | None = None, slots: Array | None = None) -> None:
        pool, stream = self.pool, self._device.stream
        load = Load(part or self._part, self._slots if slots is None else slots, pages)
        pool.fence(stream)
        _spin(pool.load(self._arena, [load], stream))

    def _save(self, pages: Array) -> None:
        pool, stream = self.pool, self._device.stream
        pool.fence(stream)
        mark: Any = pool.mark(stream)
        _spin(pool.save(self._arena, self._part, pages, self._slots, mark))

    def _copy_whole(self, *, is_load: bool) -> None:
        source, target = self._pinned, self._whole
        if not is_load:
            source, target = target, source
        with self._device.on(self._side):
            target.copy_(source, non_blocking=True)
        if self._side is not None:
            self._side.synchronize()

    def _check(self) -> None:
        """Save and load once. KVRayError: a byte is wrong, so that no speed means anything."""
        pages = torch.from_numpy(self._scattered).to(self._device.device)
        self._pages.random_(0, 255)
        expected = self._pages[pages].cpu()
        self._device.finish()
        self._save(self._scattered)
        self._pages.zero_()
        self._device.finish()
        self._load(self._scattered)
        _expect(torch.equal(self._pages[pages].cpu(), expected))

    def _check_resliced(self, slots: Array) -> None:
        """Load once; raises as `_check`."""
        arena = self._arena
        at = offsets(arena.tables, slots, RANKS * self._part.block_bytes)
        own, piece = self._part.block_bytes, self._part.block_bytes // (2 * NUM_LAYERS)
        rows = [arena.tables.data[start : start + RANKS * own] for start in at.tolist()]
        rng = default_rng(0)
        for row in rows:
            row[:] = rng.integers(0, 256, len(row), dtype=np.uint8)
        self._load(self._scattered, part=self._resliced, slots=slots)
        found = self._pages.cpu().numpy()[self._scattered]
        for row, page in zip(rows, found, strict=True):
            expected = row.reshape(2 * NUM_LAYERS, RANKS, piece)[:, 0].ravel()
            _expect(bool((page == expected).all()))


def _spin(ticket: Ticket) -> None:
    """Wait as torch does for the other copy: it does not sleep."""
    while not ticket.done():
        pass


def _expect(is_right: bool) -> None:
    if not is_right:
        raise KVRayError("Blocks came back from the arena with other bytes; report this.")
