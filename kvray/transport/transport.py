"""The protocol of transports: two ends that move pieces between the memory of two nodes."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvray.errors import TransferError

Array = npt.NDArray[Any]


class Transport(Protocol):
    """One node's end: the source of pieces for others, and the target of theirs.

    Both ends have a plain u8 array as memory, and name bytes in it by offset and size. One `send`
    moves one piece: blocks from anywhere in the source's memory, each to its own place in the
    target's. `send` runs at the source, and its answer travels to the target. After `receive` there
    has taken the answer, the bytes are in place. Thread-safe.
    """

    name: str
    writes_late: bool
    """Whether a piece that failed or missed its deadline may still arrive, until `renew`."""

    piece_bytes: int
    """The largest useful piece: larger ones are no faster, by measurement."""
    bytes_max: int | None
    """The most bytes on their way to one end at once; None: no bound."""

    @property
    def address(self) -> bytes:
        """The address that a source sends to; each `renew` changes it.

        Raises:
            TransportUnavailable: this end was closed, or could not be renewed.
        """

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        """Move a piece to `address`, of the target's end; the source's part.

        `sources` and `targets` are offsets in the memory of either end, i64 [num_blocks]; `sizes`
        are bytes, likewise. A piece of no blocks only makes the connection. Returns the parcel for
        the target's `receive`; it can be pickled.

        Raises:
            TransferTimeout: it took longer than `timeout_s`.
            TransferError: the target is gone, or the address or an offset is not its own.
        """

    def receive(self, parcel: Any, targets: Array, sizes: Array) -> None:
        """Put the piece of a `parcel` in place; the target's part. Arguments as for `send`.

        Raises:
            TransferError: it is another piece.
        """

    def renew(self) -> None:
        """Replace this end's target, so that earlier pieces can no longer write.

        Raises:
            TransportUnavailable: there is no new target; the next call tries again.
        """

    def status(self) -> dict[str, Any]:
        """Return figures for people."""

    def close(self) -> None:
        """End both ends. Twice is fine."""


def runs(starts: Array, sizes: Array, *others: Array) -> Array:
    """Return the edges of the runs of adjacent blocks: i64 [num_runs + 1].

    These are the first block of each run, and the number of blocks. `starts` are offsets, i64
    [num_blocks], and `sizes` bytes. The blocks of a run are adjacent in all `others`, too.
    """
    breaks = np.zeros(max(0, len(starts) - 1), dtype=bool)
    for offsets in (starts, *others):
        breaks |= offsets[1:] != offsets[:-1] + sizes[:-1]
    inner = np.flatnonzero(breaks) + 1
    edges: Array = np.concatenate(([0], inner, [len(starts)] if len(starts) else [])).astype("i8")
    return edges


def require_inside(offsets: Array, sizes: Array, num_bytes: int, *, whose: str) -> None:
    """Refuse blocks outside a memory of `num_bytes`, with a TransferError."""
    if len(offsets) and (int(offsets.min()) < 0 or int((offsets + sizes).max()) > num_bytes):
        raise TransferError(f"A piece has blocks that lie outside {whose} arena.")
