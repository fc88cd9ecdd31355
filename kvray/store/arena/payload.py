"""Copies blocks between an engine's pool and slots, in runs, with checksums.

Needs no lock: the bytes of a reserved slot belong to its writer, those of a leased slot do not
change.

Blocks are copied, and summed on the way, in pieces that fit into a core's cache. Memory bounds a
copy, and so it bounds the sum of bytes that have left the cache: one after the other they take 1.5
times as long as the copy. In pieces the sum costs a seventh of the copy. A second thread makes up
for that where there is much to copy.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from kvray.errors import ConfigError, LayoutMismatch
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array, Tables

_PIECE_BYTES = 512 * 2**10
"""A piece and its target fit together into a core's own cache of 1 MiB or more."""

_LINE_BYTES = 64
_WHOLE_BYTES = 64 * 2**20
"""A longer run is copied as a whole, past the cache, which several readers of the same blocks would
share. A shorter one is a sixth faster through the cache, if its target starts at a line."""

_SHARED_BYTES = 8 * 2**20
"""From here on a second thread is worth waking up."""


class Copy(NamedTuple):
    """Blocks that are contiguous in target and source, both of shape [num_blocks, block_bytes]."""

    first: int
    """Place of the first of them among all that are copied."""
    target: Array
    source: Array


class Copier:
    """Makes one process's copies; several threads may use it at once."""

    def __init__(self) -> None:
        """Start no thread until there is much to copy, and none in a forked child."""
        self._second = ThreadPoolExecutor(1, "kvray-copy")
        self._pid = os.getpid()

    def close(self) -> None:
        """End the second thread after what is under way. Twice is fine."""
        if self._pid == os.getpid():
            self._second.shutdown()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Make `copies`; of much, a second thread makes the half that comes last."""
        if sum(copy.source.nbytes for copy in copies) < _SHARED_BYTES or not self._may_share():
            _copy_all(copies)
            return
        first, last = _halves(copies)
        if not self._share(partial(_copy_all, first), partial(_copy_all, last)):
            _copy_all(last)

    def copy_and_sum(
        self, copies: Sequence[Copy], seeds: list[int], *, of_source: bool = False
    ) -> Array:
        """Make `copies`; return the checksum of what is in each target now, u64 [num_blocks].

        `seeds` has one seed a block; the copies may come in any order. `of_source`: return those of
        the sources. What others can write meanwhile is never the side that is summed: else a wrong
        byte would get a right checksum.
        """
        checksums = [0] * len(seeds)  # a list: it takes a few numbers at a time for less
        turns = iter(
            [(copy, at) for copy in copies for at in range(0, len(copy.source), _step(copy))]
        )
        # What crosses: `turns`, of which each thread takes the next, and its own `checksums`.
        take = partial(_take_turns, turns, seeds, checksums, of_source)
        if sum(copy.source.nbytes for copy in copies) >= _SHARED_BYTES and self._may_share():
            self._share(take, take, turns)
        else:
            take()
        return np.array(checksums, dtype="<u8")

    def _share(
        self, own: Callable[[], None], other: Callable[[], None], turns: Iterable[object] = ()
    ) -> bool:
        """Do `own` here, and `other` in the second thread; False if that is still at another's.

        Neither is under way when this ends, however it ends: after an exception, such as one that a
        signal raises, the caller gives its slots to others. `turns` are what both take from.
        """
        at_work, is_over = threading.Lock(), False

        def help_out() -> None:
            with at_work:
                if not is_over:
                    other()

        second: Future[None] | None = None
        try:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                second = self._second.submit(help_out)
            own()
            if second is None or second.cancel():
                with at_work:
                    is_over = True  # without a thread to be had it may be queued all the same
                return False
            second.result()
            return True
        except BaseException:
            is_over = True
            for _ in turns:
                pass
            with at_work:  # not `result`: the signal may have come before `second` had its value
                raise

    def _may_share(self) -> bool:
        return len(os.sched_getaffinity(0)) > 1 and self._pid == os.getpid()


def _halves(copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
    """Return `copies` in two parts of about as many bytes; a run may be cut."""
    first: list[Copy] = []
    left = sum(copy.source.nbytes for copy in copies) // 2
    for place, copy in enumerate(copies):
        num_blocks = left // copy.source.shape[1]
        if num_blocks < len(copy.source):
            head = copy._replace(target=copy.target[:num_blocks], source=copy.source[:num_blocks])
            tail = copy._replace(target=copy.target[num_blocks:], source=copy.source[num_blocks:])
            return [*first, head], [tail, *copies[place + 1 :]]
        first.append(copy)
        left -= copy.source.nbytes
    return first, []


def _copy_all(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy_run(copy.target, copy.source)


def copy_run(target: Array, source: Array) -> None:
    """Copy adjacent blocks to adjacent places, both [n, block_bytes]."""
    is_dense = target.flags.c_contiguous and source.flags.c_contiguous
    if not is_dense or target.nbytes > _WHOLE_BYTES or target.ctypes.data % _LINE_BYTES:
        np.copyto(target, source)
        return
    target, source = target.reshape(-1), source.reshape(-1)
    for at in range(0, len(target), _PIECE_BYTES):
        np.copyto(target[at : at + _PIECE_BYTES], source[at : at + _PIECE_BYTES])


def sum_blocks(blocks: Array, seeds: list[int]) -> list[int]:
    """Return the checksum of each block: xxh3, seeded with its word."""
    return list(map(xxhash.xxh3_64_intdigest, blocks, seeds))


def _step(copy: Copy) -> int:
    block_bytes: int = copy.source.shape[1]
    return max(1, _PIECE_BYTES // block_bytes)


def _take_turns(
    turns: Iterator[tuple[Copy, int]], seeds: list[int], checksums: list[int], of_source: bool
) -> None:
    for copy, at in turns:
        stop = at + _step(copy)
        target, source = copy.target[at:stop], copy.source[at:stop]
        first = copy.first + at
        if source.shape[1] > _PIECE_BYTES:
            summed = (source if of_source else target)[0]
            checksums[first] = _copy_large(target[0], source[0], summed, seeds[first])
        else:
            np.copyto(target, source)
            stop = first + len(target)
            summed = source if of_source else target
            checksums[first:stop] = sum_blocks(summed, seeds[first:stop])


def _copy_large(target: Array, source: Array, summed: Array, seed: int) -> int:
    """Copy one block piece by piece; return the checksum of `summed`, which is one of the two."""
    digest = xxhash.xxh3_64(seed=seed)
    for at in range(0, len(source), _PIECE_BYTES):
        stop = at + _PIECE_BYTES
        np.copyto(target[at:stop], source[at:stop])
        digest.update(summed[at:stop].data)
    return int(digest.intdigest())


class Strip(NamedTuple):
    """Runs of bytes of one size, evenly apart in a slot as well as in a page."""

    pages: Array  # u8 [num_pages, num_runs, size]
    start: int  # where in a slot the first run is
    step: int  # bytes from one run in a slot to the next


def write(
    tables: Tables, slots: Array, regions: Sequence[Array], pages: Array, *, copier: Copier
) -> Array:
    """Copy pages into reserved slots; return the checksums of the pages, u64 [num_slots].

    A region has bytes of shape [num_pages, size]; end to end they fill a slot. `pages` has a row
    for each slot.

    Raises:
        ConfigError: there are not as many pages as slots.
        LayoutMismatch: the pages are of another size than the slots.
    """
    if len(regions) == 1:
        runs = _runs(tables, slots, regions[0], pages)
        copies = [Copy(first, in_arena, in_pool) for first, in_arena, in_pool in runs]
        return copier.copy_and_sum(
            copies, key_index.words_in(tables, slots).tolist(), of_source=True
        )
    edges = [0, *accumulate(region.shape[1] for region in regions)]
    for start, stop, area in areas(tables, slots, pages, edges[-1]):
        page = pages[start]
        for region, (at, end) in zip(regions, pairwise(edges), strict=True):
            copy_run(area[:, at:end], region[page : page + stop - start])
    checksums = []
    for page, seed in zip(pages.tolist(), key_index.words_in(tables, slots).tolist(), strict=True):
        digest = xxhash.xxh3_64(seed=seed)
        for region in regions:
            digest.update(region[page].data)
        checksums.append(digest.intdigest())
    return np.array(checksums, dtype="<u8")


def read(
    tables: Tables, slots: Array, pool: Array, block_ids: Array, *, verify: bool, copier: Copier
) -> Array | None:
    """Copy leased slots into `pool`; with `verify`, return a mask of valid copies.

    `pool` has bytes of shape [num_blocks, block_bytes]. Raises as `write`.
    """
    runs = _runs(tables, slots, pool, block_ids)
    copies = [Copy(first, in_pool, in_arena) for first, in_arena, in_pool in runs]
    if not verify:
        copier.copy(copies)
        return None
    checksums = copier.copy_and_sum(copies, key_index.words_in(tables, slots).tolist())
    valid: Array = checksums == tables.slot_checksum[slots]
    return valid


def scatter(areas: Iterable[tuple[int, int, Array]], strips: Sequence[Strip], pages: Array) -> None:
    """Copy what `strips` have of blocks into pages.

    `areas` has runs of blocks, as `areas` yields those of slots; `pages` has a row for each block.
    """
    for start, stop, area in areas:
        page = pages[start]
        for strip in strips:
            in_pages = strip.pages[page : page + stop - start]
            in_arena = as_strided(
                area[:, strip.start :], in_pages.shape, (area.strides[0], strip.step, 1)
            )
            if in_pages.shape[1] == 1:
                copy_run(in_pages[:, 0], in_arena[:, 0])
            else:
                np.copyto(in_pages, in_arena)


def verify(tables: Tables, slots: Array) -> Array:
    """Return a mask of the leased `slots` that have their checksum."""
    valid: Array = sum_slots(tables, slots) == tables.slot_checksum[slots]
    return valid


def sum_slots(tables: Tables, slots: Array) -> Array:
    """Return the checksum of each slot's bytes now, u64 [num_slots]; sizes may differ."""
    checksums = np.empty(len(slots), dtype="<u8")
    seeds = key_index.words_in(tables, slots).tolist()
    geometry, each = tables.geometry, tables.geometry.run_slots
    for first, stop in runs(slots[1:] != slots[:-1] + 1, len(slots)):
        start = first
        while start < stop:
            slot = int(slots[start])
            slab, row = geometry.place_of(slot)
            end = min(stop, start + each - slot % each)
            block_bytes, count = tables.size_of(slab), end - start
            stride = geometry.stride(block_bytes)
            at = slab * geometry.slab_bytes + row * stride
            area = tables.data[at : at + count * stride].reshape(count, stride)[:, :block_bytes]
            checksums[start:end] = sum_blocks(area, seeds[start:end])
            start = end
    return checksums


def slot_bytes(tables: Tables, slot: int) -> Array:
    """Return all bytes of one slot, which the caller has reserved or knows not to change."""
    geometry = tables.geometry
    slab, row = geometry.place_of(slot)
    stride = geometry.stride(tables.size_of(slab))
    start = slab * geometry.slab_bytes + row * stride
    return tables.data[start : start + stride]


def offsets(tables: Tables, slots: Array, block_bytes: int) -> Array:
    """Return where in `tables.data` each slot's block of `block_bytes` starts, i64 [num_slots].

    A slot never reaches from one slab into the next. LayoutMismatch: the blocks of a slot are of
    another size.
    """
    geometry = tables.geometry
    slab, row = geometry.place_of(slots)
    fits = tables.serve(slab, block_bytes)
    if not fits.all():
        raise LayoutMismatch(
            f"The pool's blocks have {block_bytes} bytes, those in the arena"
            f" {tables.size_of(slab[~fits][0])}; they are not of one namespace."
        )
    starts: Array = slab * geometry.slab_bytes + row * geometry.stride(block_bytes)
    return starts


def _runs(
    tables: Tables, slots: Array, pool: Array, block_ids: Array
) -> Iterator[tuple[int, Array, Array]]:
    """Yield (place of the first, blocks in the arena, blocks in the pool) of each run.

    A run is contiguous in slots and in the pool; its blocks are [num_blocks, block_bytes].
    """
    for start, stop, area in areas(tables, slots, block_ids, pool.shape[1]):
        row = block_ids[start]
        yield start, area, pool[row : row + stop - start]


def areas(
    tables: Tables, slots: Array, block_ids: Array, block_bytes: int
) -> Iterator[tuple[int, int, Array]]:
    """Yield (start, stop, bytes [stop - start, block_bytes]) of each run, contiguous in both.

    Raises as `write`.
    """
    if len(slots) != len(block_ids):
        raise ConfigError(
            f"{len(block_ids)} blocks cannot be copied from or to {len(slots)} slots; give one"
            " row of the pool for each slot."
        )
    if len(slots) == 1:  # plain numbers cost a tenth
        slab, row = tables.geometry.place_of(int(slots[0]))
        if tables.slab_block_bytes[slab] == block_bytes:
            start = slab * tables.geometry.slab_bytes + row * tables.geometry.stride(block_bytes)
            yield 0, 1, tables.data[start : start + block_bytes][None]
            return
    starts, stride = offsets(tables, slots, block_bytes), tables.geometry.stride(block_bytes)
    # Slots that fill their slabs go on in the next one.
    breaks = (starts[1:] - starts[:-1] != stride) | (block_ids[1:] - block_ids[:-1] != 1)
    for first, stop in runs(breaks, len(slots)):
        start, count = int(starts[first]), stop - first
        area = tables.data[start : start + count * stride].reshape(count, stride)
        yield first, stop, area[:, :block_bytes]


def runs(breaks: Array, count: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of `count` items; `breaks[i]`: a run ends behind item i."""
    return pairwise([0, *(breaks.nonzero()[0] + 1).tolist(), count] if count else [])
