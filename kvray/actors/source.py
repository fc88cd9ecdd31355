"""What one node is asked for by a fetch, cut into pieces, and what has come of it."""

import threading
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from kvray.actors.orders import Offer, OfferedGroup, SourceReport
from kvray.actors.pace import FIRST_BYTES, Pace
from kvray.errors import KVRayError
from kvray.store import Reservation
from kvray.store.layout import DEFAULT_PRIORITY, PRIORITY_MAX
from kvray.store.tables import Array


@dataclass(frozen=True, slots=True)
class Offered:
    """The leading blocks of a span that its source has, one row each."""

    sizes: Array
    checksums: Array
    namespaces: Array
    priorities: Array

    @classmethod
    def read(cls, group: OfferedGroup) -> "Offered":
        """Return what another mover has said; where it has not said it all, it is the default."""
        sizes = np.frombuffer(group.sizes, dtype="<u8").astype(np.int64)
        count = len(sizes)
        namespaces, priorities = group.namespaces, group.priorities
        if len(namespaces) != 4 * count:
            namespaces = bytes(4 * count)
        if len(priorities) != count:
            priorities = bytes([DEFAULT_PRIORITY]) * count
        return cls(
            sizes,
            np.frombuffer(group.checksums, dtype="<u8"),
            np.frombuffer(namespaces, dtype="<u4"),
            np.frombuffer(priorities, dtype=np.uint8).clip(max=PRIORITY_MAX),
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one offer, of one size, and the slots of one reservation that they go to."""

    blocks: Array
    """Their places in the offer."""
    reservation: Reservation
    checksums: Array
    size: int
    """Bytes of each block."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.size * len(self.blocks)

    def split(self, count: int) -> tuple["Piece", "Piece"]:
        """Return its first `count` blocks, and the others."""
        return self._part(slice(count)), self._part(slice(count, None))

    def _part(self, part: slice) -> "Piece":
        whole = self.reservation
        return Piece(
            self.blocks[part],
            replace(whole, rows=whole.rows[part], slots=whole.slots[part]),
            self.checksums[part],
            self.size,
        )


@dataclass(slots=True, kw_only=True)
class Source:
    """One node that a fetch asks; several lanes take its pieces at once."""

    name: str
    spans: list[int] = field(default_factory=list)
    """Places in the order of what it is asked for."""
    pace: Pace = field(default_factory=lambda: Pace(most_bytes=FIRST_BYTES))
    """The transport's, once there is an offer."""
    offer: Offer | None = None
    incarnations: dict[str, int] = field(default_factory=dict)
    """Of this node's transports, as they were when the source was asked."""
    pieces: deque[Piece] = field(default_factory=deque)
    """What is left of it."""
    began_at: float = 0.0
    ended_at: float = 0.0
    num_blocks: int = 0
    num_bytes: int = 0
    suspects: list[int] = field(default_factory=list)
    """Places in the offer of blocks that came without their checksum."""
    error: KVRayError | None = None
    obstacle: str = ""
    """What the transport failed of, if that was it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left_bytes(self) -> int:
        """Bytes that no lane has taken yet."""
        return sum(piece.num_bytes for piece in self.pieces)

    def take(self) -> Piece | None:
        """Return the next piece, of as many blocks as the pace allows; None: there is no more."""
        with self.lock:
            if not self.pieces or self.error is not None:
                return None
            count = max(1, self.pace.step(self.left_bytes) // self.pieces[0].size)
            piece = self.pieces.popleft()
            if count < len(piece.blocks):
                piece, rest = piece.split(count)
                self.pieces.appendleft(rest)
            return piece

    def fail(self, error: KVRayError) -> None:
        """Note why there will be no more; the first reason stands."""
        with self.lock:
            # Not where it was raised: that would keep the arena mapped.
            self.error = self.error or error.with_traceback(None)

    def report(self) -> SourceReport:
        """Return what came of it."""
        return SourceReport(
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            seconds=max(0.0, self.ended_at - self.began_at),
            transport=self.offer.transport if self.offer else "",
            corrupt=len(self.suspects),
            error=type(self.error).__name__ if self.error else None,
            message=str(self.error) if self.error else "",
        )
