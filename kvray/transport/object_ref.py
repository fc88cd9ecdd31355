"""Pieces through Ray's object store: works wherever Ray does.

A piece is one object, the answer of the source's actor. Ray copies each run of its blocks straight
from the arena into the object, moves the object to the target's node, and shows it to the target
without a copy. A caller of `send` that is no Ray actor must copy the answer before the source's
lease ends.
"""

import secrets
from itertools import pairwise
from typing import Any

from kvray.errors import TransferError, TransportUnavailable
from kvray.transport.transport import Array, require_inside, runs

_MAGIC = b"kvray-object-ref:"


class ObjectRefTransport:
    """This node's end of the `Transport`; the target copies for itself, so nothing arrives late."""

    name = "object_ref"
    writes_late = False
    piece_bytes = 16 * 2**20
    bytes_max: int | None = 48 * 2**20  # an object store may have as little as 80 MB

    def __init__(self, memory: Array) -> None:
        """Move bytes from and to `memory`.

        Raises:
            TransportUnavailable: this process is not connected to Ray.
        """
        try:
            import ray
        except ImportError:
            raise TransportUnavailable(
                "There is no Ray here; run `pip install 'ray>=2.52'`."
            ) from None
        if not ray.is_initialized():
            raise TransportUnavailable("This process is not connected to Ray; it must be an actor.")
        self._memory = memory
        self._incarnation = 0
        self._token = secrets.token_bytes(8)
        self._closed = False

    @property
    def address(self) -> bytes:
        """An address for people only: the target copies for itself."""
        if self._closed:
            raise TransportUnavailable("The transport object_ref of this node was closed.")
        return _MAGIC + self._token + self._incarnation.to_bytes(4, "little")

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> list[Array]:
        """Return views of the runs of blocks."""
        if self._closed or not address.startswith(_MAGIC):
            raise TransferError(
                "object_ref cannot send a piece to an address of another transport,"
                " or from a closed end."
            )
        require_inside(sources, sizes, len(self._memory), whose="this node's")
        edges = runs(sources, sizes)
        ends = sources + sizes
        return [
            self._memory[int(sources[first]) : int(ends[stop - 1])]
            for first, stop in pairwise(edges.tolist())
        ]

    def receive(self, parcel: Any, targets: Array, sizes: Array) -> None:
        """Copy the runs of a piece to their places."""
        arrived = sum(len(run) for run in parcel)
        if arrived != int(sizes.sum()):
            raise TransferError(f"A piece of {int(sizes.sum())} bytes came as {arrived} bytes.")
        require_inside(targets, sizes, len(self._memory), whose="this node's")
        edges = runs(targets, sizes)
        views = iter(parcel)
        rest: Array = self._memory[:0]
        for first, stop in pairwise(edges.tolist()):
            at, end = int(targets[first]), int(targets[stop - 1] + sizes[stop - 1])
            while at < end:
                if not len(rest):
                    rest = next(views)
                    continue
                count = min(len(rest), end - at)
                self._memory[at : at + count] = rest[:count]
                rest, at = rest[count:], at + count

    def renew(self) -> None:
        """Count the incarnation; nothing could arrive late."""
        self._incarnation += 1

    def status(self) -> dict[str, Any]:
        """Return figures for people."""
        return {"incarnation": self._incarnation}

    def close(self) -> None:
        """End both ends. Twice is fine."""
        self._closed = True
        self._memory = self._memory[:0]
