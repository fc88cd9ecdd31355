"""Which bytes of memory go to or come from which bytes of a file, in few large transfers. Pure."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvray.store.layout import Array
from kvray.store.nvme.disk import BUFFERS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One transfer: blocks that lie side by side in the file, wherever they lie in memory."""

    rows: Array
    """Places of its blocks among those that were asked for."""
    offset: int
    buffers: list[Array]


def cut(
    memory: Array, starts: Array, offsets: Array, *, io_bytes: int, chunk_bytes: int
) -> list[Chunk]:
    """Return the transfers that move blocks between `memory` and one file.

    Args:
        memory: bytes of the arena.
        starts: where each block lies in `memory`, i64 [num_blocks].
        offsets: where each lies in the file, i64 [num_blocks], no two alike.
        io_bytes: bytes that are moved of each: its own, and what fills its last page.
        chunk_bytes: bytes that one transfer should not exceed; it has one block at least.
    """
    if not len(starts):
        return []
    order = np.argsort(offsets, kind="stable")
    starts, offsets = starts[order], offsets[order]
    most = min(max(1, chunk_bytes // io_bytes), BUFFERS_MAX)
    made = []
    for first, last in _runs(offsets, io_bytes):
        for at in range(first, last, most):
            stop = min(at + most, last)
            buffers = [
                memory[starts[at + one] : starts[at + one] + (end - one) * io_bytes]
                for one, end in _runs(starts[at:stop], io_bytes)
            ]
            made.append(Chunk(rows=order[at:stop], offset=int(offsets[at]), buffers=buffers))
    return made


def _runs(places: Array, step: int) -> list[tuple[int, int]]:
    """Return (first, end) of each run of `places` that ascend by `step`."""
    breaks = np.flatnonzero(np.diff(places) != step) + 1
    return list(pairwise([0, *breaks.tolist(), len(places)]))
