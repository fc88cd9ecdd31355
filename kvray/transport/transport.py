"""What every transport is: two ends that move pieces between the memory of two nodes."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvray.errors import TransferError

Array = npt.NDArray[Any]


class Transport(Protocol):
    """One node's end: the source of pieces for others, and the target of theirs.

    Both ends have a plain u8 array as memory, and name bytes in it by offset and size. A piece is
    what one `send` moves: blocks that lie anywhere in the source's memory, each to its own place in
    the target's. `send` runs at the source; what it returns travels to the target and is given to
    `receive` there, after which the bytes are in place. Thread-safe.
    """

    name: str
    writes_late: bool
    """Whether a piece that failed or missed its deadline may still land, until `renew`."""

    piece_bytes: int
    """How much one `send` is to move at most: more is no faster, by measurement."""
    bytes_max: int | None
    """How much may be on its way to one end at once; None: as much as one likes."""

    @property
    def address(self) -> bytes:
        """What a source needs to send here; another one after each `renew`.

        Raises:
            TransportUnavailable: this end was closed, or could not be made anew.
        """
        ...

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        """Move a piece to `address`; the source's part.

        A piece of no blocks moves nothing, and makes what connection there is to be.

        Args:
            address: of the target's end.
            sources: offsets in this memory, i64 [num_blocks].
            targets: offsets in the target's memory, i64 [num_blocks].
            sizes: bytes of each block, i64 [num_blocks].
            timeout_s: longest time it may take.

        Returns:
            What the target's `receive` is given; can be pickled.

        Raises:
            TransferTimeout: it took longer.
            TransferError: the target is gone, or the address or an offset is none of its.
        """
        ...

    def receive(self, parcel: Any, targets: Array, sizes: Array) -> None:
        """Have a piece in place; the target's part.

        Args:
            parcel: what the source's `send` returned.
            targets: offsets in this memory, i64 [num_blocks].
            sizes: bytes of each block, i64 [num_blocks].

        Raises:
            TransferError: it is not the piece that was asked for.
        """
        ...

    def renew(self) -> None:
        """End this target: what was sent to it before can write no more; begin a new one.

        Raises:
            TransportUnavailable: there is no new one; the next call tries again.
        """
        ...

    def status(self) -> dict[str, Any]:
        """Return figures for people."""
        ...

    def close(self) -> None:
        """End both ends. Twice is fine."""
        ...


def runs(starts: Array, sizes: Array, *others: Array) -> Array:
    """Return the edges of the runs of blocks that lie one right after the other.

    Args:
        starts: offsets of the blocks, i64 [num_blocks].
        sizes: bytes of each.
        others: further offsets, in which the blocks of a run must lie in a row as well.

    Returns:
        i64 [num_runs + 1]: the first block of each run, and the number of blocks.
    """
    breaks = np.zeros(max(0, len(starts) - 1), dtype=bool)
    for offsets in (starts, *others):
        breaks |= offsets[1:] != offsets[:-1] + sizes[:-1]
    inner = np.flatnonzero(breaks) + 1
    edges: Array = np.concatenate(([0], inner, [len(starts)] if len(starts) else [])).astype("i8")
    return edges


def require_inside(offsets: Array, sizes: Array, num_bytes: int, *, whose: str) -> None:
    """Refuse blocks that do not lie in a memory of `num_bytes`.

    Raises:
        TransferError: one does not.
    """
    if len(offsets) and (int(offsets.min()) < 0 or int((offsets + sizes).max()) > num_bytes):
        raise TransferError(f"A piece has blocks that lie outside {whose} arena.")
