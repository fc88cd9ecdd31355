"""What one batch of copies moves: addresses and sizes that numpy makes for all blocks; pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvray.engine.model.cache_layout import Part
from kvray.errors import LayoutMismatch
from kvray.store.arena.payload import offsets
from kvray.store.arena.tables import Array, Tables


class Pieces(NamedTuple):
    """Copies that do not depend on each other; u64 [num_pieces] each."""

    targets: Array  # addresses
    sources: Array  # addresses
    sizes: Array  # bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return int(self.sizes.sum())


class Place(NamedTuple):
    """Where blocks lie in one region, and in their slots; i64 [num_blocks] addresses."""

    pages: Array
    slots: Array
    size: int


def addresses(tables: Tables, slots: Array, block_bytes: int) -> Array:
    """Return where each slot begins; LayoutMismatch: one is of another size."""
    return tables.data.ctypes.data + offsets(tables, slots, block_bytes)


def places_of(at: Array, part: Part, pages: Array) -> list[Place]:
    """Return where the bytes of blocks are that begin `at`, for each region of their part.

    LayoutMismatch: there is no such page.
    """
    num_blocks, places = len(at), []
    for region in part.regions:
        if region.is_gap:
            places.append(Place(at, at, 0))
            at = at + region.size
            continue
        num_pages, stride = region.pages.shape[0], region.pages.stride(0)
        if len(pages) != num_blocks or ((pages < 0) | (pages >= num_pages)).any():
            raise LayoutMismatch(
                f"{len(pages)} pages for {num_blocks} slots, each to be one of {num_pages}, do"
                " not fit; report this with the engine's version."
            )
        places.append(Place(region.pages.data_ptr() + pages * stride, at, region.size))
        at = at + region.size
    return places


def of_size(targets: Array, sources: Array, size: int) -> Pieces:
    """Return copies of `size` bytes each."""
    return Pieces(
        targets.astype(np.uint64),
        sources.astype(np.uint64),
        np.full(len(targets), size, dtype=np.uint64),
    )


def concatenate(batches: Sequence[Pieces]) -> Pieces:
    """Return all copies of `batches` as one."""
    if len(batches) == 1:
        return batches[0]
    return Pieces(*(np.concatenate(column) for column in zip(*batches, strict=True)))


class HostMemory(NamedTuple):
    """What copies leave from or go to."""

    base: int  # its address
    registered_bytes: int  # from its start on, registered with the device
    chunk_bytes: int
    """One copy may not reach over a multiple of it: such ranges were registered one by one."""


def join(pieces: Pieces, in_memory: Array, *, base: int, chunk_bytes: int) -> Pieces:
    """Return the same copies with neighbours made one where both sides go on without a gap.

    `in_memory` is that of `targets` and `sources` which lies in host memory, see `HostMemory`. No
    copy reaches over a multiple of `chunk_bytes` there, unless one piece already does.
    """
    targets, sources, sizes = pieces
    if len(sizes) < 2:
        return pieces
    chunks = (in_memory - np.uint64(base)) // np.uint64(chunk_bytes)
    goes_on = (
        (targets[1:] == targets[:-1] + sizes[:-1])
        & (sources[1:] == sources[:-1] + sizes[:-1])
        & (chunks[1:] == chunks[:-1])
    )
    firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    if len(firsts) == len(sizes):
        return pieces
    return Pieces(targets[firsts], sources[firsts], np.add.reduceat(sizes, firsts))
