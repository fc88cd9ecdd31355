"""Moves blocks between an arena and one segment file; the thread that moves also sums.

What crosses between threads: views of the arena's slots, which the caller has leased or reserved,
and arrays over all requested blocks, of which each task writes its own rows.

As many transfers run at a time as there are threads, without a queue.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from kvray.errors import ConfigError, TierError
from kvray.store.arena import payload
from kvray.store.arena.layout import Array, Geometry, align
from kvray.store.arena.payload import runs
from kvray.store.arena.tables import Tables
from kvray.store.nvme.disk import BUFFERS_MAX
from kvray.store.nvme.segment_files import Segment

Task = Callable[[], None]


class IoThreads:
    """A fixed number of threads; each caller of `run` works too, and several may call at once."""

    def __init__(self, num_threads: int) -> None:
        """Use `num_threads` threads, of which the caller is one."""
        self.num_threads = num_threads
        self._num_helpers = max(0, num_threads - 1)
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "kvray-nvme")

    def run(self, tasks: Sequence[Task]) -> None:
        """Do all `tasks`, in any order; return when all of them have ended.

        At most `num_threads` tasks of a caller run at once. After the first failure none begins.
        Exception: the error of the first task that failed.
        """
        turns = iter(tasks)
        helpers = []
        # What crosses: `turns`, of which each thread takes the next.
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the caller goes on alone
            for _ in range(min(self._num_helpers, len(tasks) - 1)):
                helpers.append(self._helpers.submit(_take_turns, turns))
        try:
            _take_turns(turns)
        finally:
            # Also after an error: tasks that others have begun still use the caller's memory.
            ended = [one for one in helpers if not one.cancel()]
            errors = [error for one in ended if (error := one.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads after what is under way. Twice is fine."""
        self._helpers.shutdown()


def _take_turns(turns: Iterator[Task]) -> None:
    try:
        for task in turns:
            task()
    except BaseException:
        for _ in turns:
            pass
        raise


_CHUNK_BYTES_MIN = 2**20
"""The least that one transfer moves: from here on a device is at full speed."""

_CHUNK_BYTES_MAX = 32 * 2**20
"""The most that one transfer moves: blocks are summed while other transfers run."""


class Move(NamedTuple):
    """Blocks of one segment, and the slots of an arena that they go to or come from."""

    segment: Segment
    disk_rows: Array  # slots of the segment, counted from its first
    arena: Tables
    arena_slots: Array
    rows: Array  # places of the blocks among all requested ones


class Chunk(NamedTuple):
    """One transfer: blocks that lie side by side in the file, wherever they lie in memory."""

    rows: Array  # places of its blocks among the requested ones
    offset: int
    buffers: list[Array]


def chunk_bytes(moves: Sequence[Move], num_threads: int) -> int:
    """Return the bytes of a transfer, so that each of the threads has one."""
    total = sum(len(one.rows) * align(one.segment.shape.block_bytes) for one in moves)
    return min(max(-(-total // num_threads), _CHUNK_BYTES_MIN), _CHUNK_BYTES_MAX)


def read_tasks(move: Move, *, chunk_bytes: int, sums: Array, unreadable: Array) -> list[Task]:
    """Return the tasks that read blocks from their segment.

    `sums`, u64 and one for each requested block, gets the checksums of what came; `unreadable`, a
    mask like it, the blocks that the device refused.
    """

    def read(chunk: Chunk) -> None:
        try:
            move.segment.file.read(chunk.buffers, chunk.offset)
        except TierError:
            if len(chunk.rows) == 1:
                unreadable[move.rows[chunk.rows]] = True
                return
            # One bad sector must not cost its neighbours.
            some = move._replace(
                disk_rows=move.disk_rows[chunk.rows], arena_slots=move.arena_slots[chunk.rows]
            )
            for one in chunks(some, chunk_bytes=1):
                read(one._replace(rows=chunk.rows[one.rows]))
            return
        slots = move.arena_slots[chunk.rows]
        sums[move.rows[chunk.rows]] = payload.sum_slots(move.arena, slots)

    return [partial(read, chunk) for chunk in chunks(move, chunk_bytes)]


def moves(
    segments: dict[int, Segment], slots: Array, geometry: Geometry, arena: Tables, into: Array
) -> list[Move]:
    """Return one move for each segment that has some of `slots`; `into` has those of `arena`."""
    slab, row = geometry.place_of(slots)
    made = []
    for one in np.unique(slab).tolist():
        rows = np.flatnonzero(slab == one)
        made.append(Move(segments[one], row[rows], arena, into[rows], rows))
    return made


def check_same(tables: Tables, slots: Array, arena: Tables, arena_slots: Array) -> None:
    """Raise ConfigError unless the slots have blocks of the same keys and parts, in order."""
    same = len(slots) == len(arena_slots) and np.array_equal(
        tables.slot_key[slots], arena.slot_key[arena_slots]
    )
    if not same or np.any(tables.slot_part[slots] != arena.slot_part[arena_slots]):
        raise ConfigError(
            f"The {len(arena_slots)} slots of the arena are not of the same blocks as the"
            f" {len(slots)} of the NVMe tier; give one for each, in the same order."
        )


def chunks(move: Move, chunk_bytes: int) -> list[Chunk]:
    """Return the transfers of a move."""
    block_bytes = move.segment.shape.block_bytes
    return cut(
        move.arena.data,
        payload.offsets(move.arena, move.arena_slots, block_bytes),
        move.segment.offsets(move.disk_rows),
        io_bytes=align(block_bytes),
        chunk_bytes=chunk_bytes,
    )


def cut(
    memory: Array, starts: Array, offsets: Array, *, io_bytes: int, chunk_bytes: int
) -> list[Chunk]:
    """Return the transfers that move blocks between `memory` and one file.

    `starts` are the blocks' places in `memory` and `offsets` those in the file, all different; i64
    [num_blocks]. Each block moves `io_bytes`: its own, and the rest of its last page. A transfer
    keeps to `chunk_bytes`, but has at least one block.
    """
    if not len(starts):
        return []
    order = np.argsort(offsets, kind="stable")
    starts, offsets = starts[order], offsets[order]
    most = min(max(1, chunk_bytes // io_bytes), BUFFERS_MAX)
    made = []
    for first, last in runs(np.diff(offsets) != io_bytes, len(offsets)):
        for at in range(first, last, most):
            stop = min(at + most, last)
            buffers = [
                memory[starts[at + one] : starts[at + one] + (end - one) * io_bytes]
                for one, end in runs(np.diff(starts[at:stop]) != io_bytes, stop - at)
            ]
            made.append(Chunk(order[at:stop], int(offsets[at]), buffers))
    return made
