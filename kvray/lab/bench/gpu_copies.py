"""Copies of blocks between an arena and a paged pool, beside one copy of pinned memory."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.random import default_rng

from kvray.config import format_size
from kvray.connector.device.gpu import DevicePool
from kvray.connector.device.pool import Load
from kvray.connector.model.cache_layout import LayerRange, Part, Region
from kvray.errors import KVRayError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.gpu_device import GpuDevice
from kvray.lab.bench.report import Row, copy_row
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    TOKENS_PER_BLOCK,
    Duration,
    Pair,
    measure,
    reserve_all,
    timed,
)
from kvray.store import Arena
from kvray.store.arena.tables import Array

NUM_LAYERS = 32
_SLOWEST_BYTES_S = 10e9
"""The device is kept busy for as long as copies of this speed would take."""
_GROWTH_S = 5.0
"""How long to wait for more of the arena to be registered."""


def part_of(pages: torch.Tensor, num_layers: int) -> Part:
    """Return pages [num_pages, block_bytes] of bytes, in which layers lie one after the other."""
    share = pages.shape[1] // num_layers
    steps = tuple(LayerRange((one,), one * share, (one + 1) * share) for one in range(num_layers))
    return Part(
        index=0,
        group=0,
        regions=(Region(pages=pages, steps=steps),),
        window_blocks=None,
        is_stored_here=True,
    )


def open_pool(part: Part, arena: Arena, *, num_layers: int) -> DevicePool:
    """Return the pool of `part` once the arena's memory is registered, if it can be."""
    pool = DevicePool([part], num_layers=num_layers, has_hooks=True)
    pool.attend(arena)
    before, grown = -1, time.monotonic()
    while (now := pool.registered_bytes(arena)) < len(arena.tables.data):
        if now != before:
            before, grown = now, time.monotonic()
        elif time.monotonic() - grown > _GROWTH_S:
            break  # copies are slower then, and the report says so
        time.sleep(0.01)
    return pool


class BlockCopies:
    """Blocks of one size, in an arena and in a pool of twice as many pages."""

    def __init__(
        self, device: GpuDevice, arena: Arena, *, num_blocks: int, block_bytes: int
    ) -> None:
        """Reserve slots and make the pool.

        Raises:
            KVRayError: the arena has no room.
        """
        self._device = device
        self._arena = arena
        self._num_bytes = num_blocks * block_bytes
        keys = chain_keys(
            np.arange(num_blocks * TOKENS_PER_BLOCK),
            tokens_per_block=TOKENS_PER_BLOCK,
            seed=request_seed(b"kvray bench gpu"),
        )
        self._reservation = reserve_all(arena, keys, block_bytes=block_bytes)
        self._slots: Array = self._reservation.slots.astype(np.int64)
        self._pages = torch.zeros(
            2 * num_blocks, block_bytes, dtype=torch.uint8, device=device.device
        )
        self._part = part_of(self._pages, NUM_LAYERS)
        self._pool = open_pool(self._part, arena, num_layers=NUM_LAYERS)
        self._pinned = device.pinned(self._num_bytes)
        self._whole = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device.device)
        self._side = device.make_stream()
        rng = default_rng(0)
        self._in_order: Array = np.arange(num_blocks)
        self._scattered: Array = rng.permutation(2 * num_blocks)[:num_blocks]

    def close(self) -> dict[str, int]:
        """Give everything back; return the bytes that were copied, by the way of copying."""
        self._pool.close()
        self._arena.abort(self._reservation)
        return dict(self._pool.copied_bytes)

    def take(self, pairs: int) -> Iterator[Row]:
        """Measure loads and saves, of scattered pages and of a run, the device idle and busy."""
        self._check()
        size = self._num_bytes // len(self._slots)
        kind, least = ("4mib", 0.9) if size == LARGE_BYTES else ("128kib", 0.8)
        for is_busy in (False, True):
            for is_run in (False, True):
                pages = self._in_order if is_run else self._scattered
                title = f"{{}}, {format_size(size)} blocks"
                title += ", pages in a row" if is_run else ""
                title += ", beside matrix products" if is_busy else ""
                suffix = ("_run" if is_run else "") + ("_busy" if is_busy else "")
                for verb, name, is_load in (("load", "h2d", True), ("save", "d2h", False)):
                    yield copy_row(
                        title.format(verb),
                        f"gpu_{name}_{{}}_{kind}{suffix}",
                        self._pairs(pairs, pages, is_load=is_load, is_busy=is_busy),
                        num_bytes=self._num_bytes,
                        least=least,
                    )

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
        pool, stream = self._pool, self._device.stream
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
