"""Plans few large transfers between bytes of memory and bytes of a file. Pure."""

from typing import NamedTuple

import numpy as np

from kvray.store.arena.layout import Array
from kvray.store.arena.payload import runs
from kvray.store.nvme.disk import BUFFERS_MAX


class Chunk(NamedTuple):
    """One transfer: blocks that lie side by side in the file, wherever they lie in memory."""

    rows: Array
    """Places of its blocks among the requested ones."""
    offset: int
    buffers: list[Array]


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
