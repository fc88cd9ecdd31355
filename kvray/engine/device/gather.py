"""Copies of small pieces by a kernel, where the GPU's copy engines spend their time on starting.

A kernel reads and writes registered host memory by itself. It takes cores of the GPU from the
passes beside it, so it has few programs: as many as fill the bus, 16 on an H200. From which size of
pieces on the copy engines are as fast differs from card to card, so it is measured, see
`calibrate`.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvray.engine.device.pool import Pieces

_PROGRAMS = 32
_WORDS = 1024
"""Words of 8 bytes that a program has under way."""

_SIZES = tuple(kib * 1024 for kib in (8, 16, 32, 64))
_ROUND_BYTES = 16 * 2**20
"""Pieces enough that what begins a kernel does not count: a load has thousands of them."""
MEMORY_BYTES = 2 * _ROUND_BYTES
"""What `calibrate` needs on either side."""
_ROUNDS = 3
_GAIN = 1.1
"""How much faster the kernel must be to be worth the cores that it takes."""


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy(targets, sources, sizes, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + piece).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + piece).to(tl.pointer_type(tl.int64))
        words = tl.load(sizes + piece) // 8
        for start in range(0, words, WORDS):
            at = start + tl.arange(0, WORDS)
            found = tl.load(source + at, mask=at < words)
            tl.store(target + at, found, mask=at < words)


def is_even(pieces: Pieces) -> bool:
    """Whether all addresses and sizes are whole words, as the kernel needs them."""
    return not any((column & np.uint64(7)).any() for column in pieces)


def gather(pieces: Pieces, device: torch.device) -> None:
    """Have the current stream of `device` make copies, in any order.

    Host memory is registered with the device, and the pieces are `is_even`. The host does not wait.
    """
    count = len(pieces.sizes)
    # Rows of an even length: Triton compiles once more for arguments at odd addresses.
    columns = torch.empty(
        (3, count + count % 2), dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    columns[:, :count] = torch.from_numpy(np.stack(pieces).astype(np.int64))
    columns = columns.to(device, non_blocking=True)
    _copy[(min(count, _PROGRAMS),)](*columns, count, WORDS=_WORDS)


class Below(NamedTuple):
    """Pieces of at most so many bytes on average are for the kernel; 0: none are."""

    load: int
    save: int


def calibrate(
    host: int,
    device: int,
    by_engines: Callable[[Pieces, bool], float],
    by_kernel: Callable[[Pieces, bool], float],
) -> Below:
    """Compare both for pieces of growing sizes, which takes some 60 ms, and return what was found.

    `host` and `device` are addresses of `MEMORY_BYTES` each. The two make copies, which are loads
    if they are told so, and return the seconds that these took.
    """
    best = []
    for is_load in (True, False):
        times = []
        for size in _SIZES:
            pieces = _spread(host, device, size, is_load=is_load)
            rounds = [
                (by_engines(pieces, is_load), by_kernel(pieces, is_load)) for _ in range(_ROUNDS)
            ]
            engines, kernel = map(min, zip(*rounds, strict=True))
            times.append((size, engines, kernel))
        best.append(largest(times))
    return Below(*best)


def largest(times: Sequence[tuple[int, float, float]]) -> int:
    """Return the size up to which the kernel is the faster one by `_GAIN`; 0: it never is.

    `times` has growing sizes, each with the time of the copy engines and of the kernel.
    """
    ahead = takewhile(lambda one: one[2] * _GAIN <= one[1], times)
    return max((size for size, *_ in ahead), default=0)


def _spread(host: int, device: int, size: int, *, is_load: bool) -> Pieces:
    """Return copies of every other piece of `size`, so that no two can be made one."""
    at = np.arange(_ROUND_BYTES // size, dtype=np.uint64) * np.uint64(2 * size)
    ends = at + np.uint64(device), at + np.uint64(host)
    targets, sources = ends if is_load else ends[::-1]
    return Pieces(targets, sources, np.full(len(at), size, dtype=np.uint64))
