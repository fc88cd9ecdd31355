"""Copies blocks, and sums them on the way, in pieces that fit into a core's cache.

Memory bounds a copy, and so it bounds the sum of bytes that have left the cache: one after the
other they take 1.5 times as long as the copy. In pieces the sum costs a seventh of the copy. A
second thread makes up for that where there is much to copy.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from kvray.store.arena.layout import Array

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
        second = None
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            second = self._second.submit(_copy_all, last)
        _copy_all(first)
        if second is None or second.cancel():  # it is still at somebody else's
            _copy_all(last)
        else:
            second.result()

    def copy_and_sum(
        self, copies: Sequence[Copy], seeds: list[int], *, of_source: bool = False
    ) -> Array:
        """Make `copies`; return the checksum of what is in each target now, u64 [num_blocks].

        `seeds` has one seed a block; the copies may come in any order. `of_source`: return those of
        the sources. What others can write meanwhile is never the side that is summed: else a wrong
        byte would get a right checksum.
        """
        checksums = [0] * len(seeds)  # a list: it takes a few numbers at a time for less
        turns = iter([(copy, at) for copy in copies for at in _starts(copy)])
        second = None
        if sum(copy.source.nbytes for copy in copies) >= _SHARED_BYTES and self._may_share():
            # What crosses: `turns`, of which each thread takes the next, and its own `checksums`.
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                second = self._second.submit(_take_turns, turns, seeds, checksums, of_source)
        _take_turns(turns, seeds, checksums, of_source)
        if second is not None and not second.cancel():  # it may be at its last piece
            second.result()
        return np.array(checksums, dtype="<u8")

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


def _starts(copy: Copy) -> range:
    return range(0, len(copy.source), _step(copy))


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
