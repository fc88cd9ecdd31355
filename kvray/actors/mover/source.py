"""One node that a fetch reads from: its read lease cut into pieces, and their results."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvray.actors.mover.orders import ReadLease, SourceReport
from kvray.errors import KVRayError
from kvray.store import Reservation
from kvray.store.arena.tables import Array

FIRST_BYTES = 16 * 2**20
_LEAST_BYTES = 4 * 2**20
_LAST_BYTES = 64 * 2**20  # checking this much takes no longer than one more piece would
_PIECE_S = 0.1
"""The target time of a piece, its wait for the one before included. The end of each piece is when
a stopped source is noticed and the lease renewed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one size that one `send` moves, and the reserved slots that they go to."""

    blocks: Array
    """Their places in the read lease."""
    reservation: Reservation
    checksums: Array
    size: int
    """Bytes of each block."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.size * len(self.blocks)

    def split(self, count: int) -> tuple["Piece", "Piece"]:
        """Return its first `count` blocks, and the rest."""
        return self._part(slice(count)), self._part(slice(count, None))

    def _part(self, part: slice) -> "Piece":
        return Piece(
            self.blocks[part], self.reservation.only(part), self.checksums[part], self.size
        )


class Pace:
    """The size of the next piece, from the time that the last one took.

    Pieces are large on a fast link, which idles for a moment between two of them. They shrink
    towards the end, because the last one is checked while nothing else is under way.
    """

    def __init__(self, *, most_bytes: int) -> None:
        """Start with a size that suits any link; `most_bytes` is the transport's own bound."""
        self._most_bytes = most_bytes
        self._bytes = min(FIRST_BYTES, most_bytes)
        self.seconds = 0.0
        """What the last piece took."""

    def step(self, left_bytes: int) -> int:
        """Return the bytes of the next piece when `left_bytes` are left."""
        return min(self._bytes, max(left_bytes // 2, _LAST_BYTES))

    def note(self, num_bytes: int, seconds: float) -> None:
        """Adapt to the time that a piece took."""
        self.seconds = seconds
        fitting = int(num_bytes * _PIECE_S / max(seconds, 1e-6))
        self._bytes = min(self._most_bytes, max(_LEAST_BYTES, fitting))


@dataclass(slots=True, kw_only=True)
class Source:
    """One node that a fetch reads from; several lanes take its pieces at once."""

    name: str
    spans: list[int] = field(default_factory=list)
    """Indices of its spans in the order."""
    pace: Pace = field(default_factory=lambda: Pace(most_bytes=FIRST_BYTES))
    """The transport's, once there is a lease."""
    lease: ReadLease | None = None
    incarnations: dict[str, int] = field(default_factory=dict)
    """Incarnation of each of this node's transports when the source was asked."""
    ahead: dict[int, Reservation] = field(default_factory=dict)
    """Index of a span -> slots that are reserved before there is a lease."""
    pieces: deque[Piece] = field(default_factory=deque)
    """Those that no lane has taken yet."""
    began_at: float = 0.0
    leased_at: float = 0.0
    ended_at: float = 0.0
    num_blocks: int = 0
    num_bytes: int = 0
    suspects: list[tuple[int, bytes]] = field(default_factory=list)
    """Part and key of blocks that arrived without their checksum."""
    error: KVRayError | None = None
    link_error: tuple[str, str] | None = None
    """A transport that failed by itself, and how."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left_bytes(self) -> int:
        """Bytes of the pieces that no lane has taken yet."""
        return sum(piece.num_bytes for piece in self.pieces)

    def take(self) -> Piece | None:
        """Return the next piece, as large as the pace allows; None if nothing is left."""
        with self.lock:
            if not self.pieces or self.error is not None:
                return None
            count = max(1, self.pace.step(self.left_bytes) // self.pieces[0].size)
            piece = self.pieces.popleft()
            if count < len(piece.blocks):
                piece, rest = piece.split(count)
                self.pieces.appendleft(rest)
            return piece

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Have an error in a block end this source, and not the fetch; the first one stands."""
        try:
            yield
        except KVRayError as error:
            with self.lock:
                # Without its traceback, whose frames would keep the arena mapped.
                self.error = self.error or error.with_traceback(None)

    def report(self) -> SourceReport:
        """Return its figures."""
        return SourceReport.of(
            self.error,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            seconds=max(0.0, self.ended_at - self.began_at),
            transport=self.lease.transport if self.lease else "",
            corrupt=len(self.suspects),
        )
