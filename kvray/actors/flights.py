"""Fetches that are under way: no block is brought twice at once."""

import asyncio
import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvray.actors.orders import FetchReport, Span
from kvray.actors.peers import mover_of
from kvray.actors.staging import Piece
from kvray.arrival import NVME
from kvray.block import KEY_BYTES, BlockKey

FLIGHT_BLOCKS_MAX = 4096
"""Blocks of one flight; what is longer comes in several, one after the other."""


class Flight:
    """One order to the node's mover, and what waits for it."""

    def __init__(self, keys: Sequence[BlockKey], pieces: Sequence[Piece]) -> None:
        """Bring `pieces` of `keys`."""
        self.keys = keys
        self.pieces = tuple(pieces)
        self.blocks = [
            (keys[block], piece.part)
            for piece in pieces
            for block in range(piece.start, piece.stop)
        ]
        self.ended = asyncio.Event()
        self.report: FetchReport | None = None
        """None: it is under way, or the mover did not answer."""

    @property
    def is_whole(self) -> bool:
        """Whether everything has come."""
        return self.report is not None and all(
            here >= piece.stop - piece.start
            for here, piece in zip(self.report.here, self.pieces, strict=False)
        )

    def landed(self, keys: Sequence[BlockKey]) -> Iterator[tuple[Piece, str]]:
        """Yield what has come of `keys`, a prefix, and the transport that brought it.

        Of a flight under way, of which only its disk can be told what brings it, all may come.
        """
        shared = min(len(keys), len(self.keys))
        # Keys are chained: who has one key in common has all before it.
        shared = bisect.bisect_left(
            range(shared), True, key=lambda block: keys[block] != self.keys[block]
        )
        for place, piece in enumerate(self.pieces):
            stop, transport = piece.start, ""
            if self.report is not None:
                name = NVME if piece.shard == NVME else mover_of(piece.shard)
                source = self.report.sources.get(name)
                transport = source.transport if source is not None else ""
                stop += self.report.here[place] if place < len(self.report.here) else 0
            elif piece.shard == NVME:
                stop, transport = piece.stop, NVME
            stop = min(stop, piece.stop, shared)
            if stop > piece.start and transport:
                yield replace(piece, stop=stop), transport


class Flights:
    """Those under way, by the blocks they bring; state of the shard's event loop."""

    def __init__(self) -> None:
        """Start without any."""
        self._by_block: dict[tuple[BlockKey, int], Flight] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def bringing(self, keys: Sequence[BlockKey], pieces: Iterable[Piece]) -> list[Flight]:
        """Return the flights that bring some of `pieces`."""
        found = {
            id(flight): flight
            for piece in pieces
            for block in range(piece.start, piece.stop)
            if (flight := self._by_block.get((keys[block], piece.part))) is not None
        }
        return list(found.values())

    def depart(self, flight: Flight) -> None:
        """Enter a flight none of whose blocks is on its way."""
        self._by_block.update(dict.fromkeys(flight.blocks, flight))
        self._count += 1

    def arrive(self, flight: Flight) -> None:
        """Take a flight out, whatever became of it, and wake who waits for it."""
        for block in flight.blocks:
            self._by_block.pop(block, None)
        self._count -= 1
        flight.ended.set()


def head(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the first of `pieces`, no more than one flight takes."""
    taken, room = [], FLIGHT_BLOCKS_MAX
    for piece in pieces:
        if room <= 0:
            break
        stop = min(piece.stop, piece.start + room)
        taken.append(Piece(shard=piece.shard, part=piece.part, start=piece.start, stop=stop))
        room -= stop - piece.start
    return taken


def spans_of(
    keys: Sequence[BlockKey], pieces: Iterable[Piece], windowed: frozenset[int]
) -> Iterator[Span]:
    """Yield what the mover is to be told of `pieces`.

    Args:
        keys: of the whole prefix.
        pieces: what is to come.
        windowed: parts of which a block is of use without the one before it.
    """
    for piece in pieces:
        yield Span(
            source=mover_of(piece.shard),
            part=piece.part,
            keys=b"".join(keys[piece.start : piece.stop]),
            parent=keys[piece.start - 1] if piece.start else b"",
            depth=piece.start,
            needs_parent=piece.start > 0 and piece.part not in windowed,
        )


def behind(span: Span, num_blocks: int) -> Span:
    """Return what of a span comes after its first blocks, for a node that may not have those.

    Its blocks are of use without their parents: who asks for them has these.
    """
    at = num_blocks * KEY_BYTES
    return replace(
        span,
        keys=span.keys[at:],
        parent=span.keys[at - KEY_BYTES : at] if num_blocks else span.parent,
        depth=span.depth + num_blocks,
        needs_parent=False,
    )
