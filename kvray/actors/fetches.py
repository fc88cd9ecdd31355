"""Fetches of a mover: ask for blocks, reserve slots for them, have them sent, check and commit.

Slots are reserved for the whole order, parents before their children, before anything is sent. Then
each source has lanes that move one piece after the other: while one lane checks what has come, the
other's piece is on its way.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from kvray.actors.acquaintances import Acquaintances, is_of_the_way
from kvray.actors.doubts import Doubts
from kvray.actors.orders import FetchOrder, FetchReport, SendOrder, Span, Want
from kvray.actors.pace import FIRST_BYTES, Pace
from kvray.actors.source import Offered, Piece, Source
from kvray.block import KEY_BYTES, BlockKey, split_keys
from kvray.errors import KVRayError, ShardUnavailable, TransferTimeout
from kvray.store import Arena, Wanted, lease, payload
from kvray.store.tables import Array
from kvray.transport import Transport

NUM_LANES = 2
_THREADS_MAX = 32
"""Sources that are asked, or lanes that move, at once; the others wait for their turn."""

_LOCK_WAIT_S = 0.5
_MARGIN_S = 0.1
"""By so much a source gives up before who asked it does, so that its reason arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """What fetches need to know, as plain values."""

    call_timeout_s: float
    lease_s: float
    bytes_in_flight: int


class Fetches:
    """The destination side of a mover. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        transports: Mapping[str, Transport],
        doubts: Mapping[str, Doubts],
        acquaintances: Acquaintances,
        settings: FetchSettings,
    ) -> None:
        """Fetch into `arena`.

        Args:
            arena: joined by this process.
            transports: by name, the best first.
            doubts: of each transport.
            acquaintances: calls other movers, and knows by which transports they may send.
            settings: see there.
        """
        self._arena = arena
        self._transports = transports
        self._doubts = doubts
        self._acquaintances = acquaintances
        self._settings = settings
        self._flights = {
            name: _Flight(min(settings.bytes_in_flight, one.bytes_max or settings.bytes_in_flight))
            for name, one in transports.items()
        }
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_blocks = 0
        self.num_corrupt = 0

    def fetch(self, order: FetchOrder, *, deadline: float) -> FetchReport:
        """Bring what an order asks for here; see `Mover.fetch`."""
        sources: dict[str, Source] = {}
        for index, span in enumerate(order.spans):
            if self._here(span) < len(span.keys) // KEY_BYTES:
                sources.setdefault(span.source, Source(name=span.source)).spans.append(index)
        if sources:
            try:
                self._fetch_from(sources, order, deadline)
            finally:
                for one in sources.values():
                    self._finish(one)
        return FetchReport(
            here=tuple(self._here(span) for span in order.spans),
            sources={name: one.report() for name, one in sources.items()},
        )

    def _fetch_from(
        self, sources: Mapping[str, Source], order: FetchOrder, deadline: float
    ) -> None:
        """Ask all sources, reserve slots for what they have, and have it sent."""
        _at_once([partial(self._ask, one, order, deadline) for one in sources.values()])
        self._reserve(order, sources)
        _at_once(
            [
                partial(self._move, one, deadline)
                for one in sources.values()
                for _ in range(NUM_LANES if one.left_bytes > FIRST_BYTES else 1)
            ]
        )

    def _ask(self, source: Source, order: FetchOrder, deadline: float) -> None:
        """Have a source lease what it has of the order."""
        addresses = {}
        for name in self._acquaintances.offered(source.name):
            with suppress(KVRayError):
                source.incarnations[name], addresses[name] = self._doubts[name].target()
        want = Want(
            groups=tuple((order.spans[i].part, order.spans[i].keys) for i in source.spans),
            lease_s=self._settings.lease_s,
            addresses=addresses,
        )
        try:
            timeout_s = _left(deadline, self._settings.call_timeout_s)
            offer = self._acquaintances.peer(source.name).offer(want, timeout_s=timeout_s)
        except KVRayError as error:
            source.fail(error)
            return
        source.offer = offer
        source.pace = Pace(most_bytes=self._transports[offer.transport].piece_bytes)

    def _reserve(self, order: FetchOrder, sources: Mapping[str, Source]) -> None:
        """Reserve slots for everything that was offered, in the order's own order."""
        starts = dict.fromkeys(sources, 0)
        for index, span in enumerate(order.spans):
            source = sources.get(span.source)
            if source is None or source.offer is None or index not in source.spans:
                continue
            group = source.offer.groups[source.spans.index(index)]
            offered = Offered.read(group)
            try:
                source.pieces += self._pieces(span, offered, starts[span.source])
            except KVRayError as error:
                source.fail(error)
            starts[span.source] += len(offered.sizes)

    def _pieces(self, span: Span, offered: Offered, start: int) -> list[Piece]:
        """Reserve slots for the offered head of a span; return what fills them, by size.

        Args:
            span: see there.
            offered: its leading blocks.
            start: place of its first block in the offer.
        """
        sizes, checksums = offered.sizes, offered.checksums
        keys = split_keys(span.keys[: len(sizes) * KEY_BYTES])
        before = BlockKey(span.parent) if span.parent else None
        pieces: list[Piece] = []
        for first, stop in _equal_runs(sizes):
            size = int(sizes[first])
            made = self._arena.reserve(
                keys[first:stop],
                parent=keys[first - 1] if first else before,
                depth=span.depth + first,
                part=span.part,
                block_bytes=size,
                namespace=int(offered.namespaces[first]),
                priority=offered.priorities[first:stop],
                needs_parent=span.needs_parent or first > 0,
                wait_s=_LOCK_WAIT_S,
            )
            if made is None:
                self._abort(pieces)
                raise ShardUnavailable("The arena of this node is busy or retired.")
            if len(made.slots):
                rows = made.rows + first
                blocks = (rows + start).astype("<u4")
                pieces.append(Piece(blocks, replace(made, rows=rows), checksums[rows], size))
            if made.dropped:
                break
        return pieces

    def _move(self, source: Source, deadline: float) -> None:
        """One lane: move pieces of a source until there are none left, or one failed."""
        if source.offer is None:
            return
        flight = self._flights[source.offer.transport]
        while (piece := source.take()) is not None:
            try:
                flight.enter(piece.num_bytes, deadline)
            except KVRayError as error:  # nothing was sent
                self._abort([piece])
                source.fail(error)
                return
            try:
                self._carry(source, piece, deadline)
            except KVRayError as error:
                source.fail(error)
            finally:
                flight.leave(piece.num_bytes)

    def _carry(self, source: Source, piece: Piece, deadline: float) -> None:
        """Have one piece sent and committed, or leave its slots to whom they are safe with."""
        assert source.offer is not None
        transport = self._transports[source.offer.transport]
        incarnation = source.incarnations[transport.name]
        doubts = self._doubts[transport.name]
        targets = payload.offsets(self._arena.tables, piece.reservation.slots, piece.size)
        sizes = np.full(len(targets), piece.size, dtype=np.int64)
        with source.lock:
            source.began_at = source.began_at or time.monotonic()
        with doubts.passage(piece.reservation, incarnation):
            timeout_s = _left(deadline, self._settings.lease_s)
            order = SendOrder(
                token=source.offer.token,
                blocks=piece.blocks.tobytes(),
                targets=targets.astype("<i8").tobytes(),
                timeout_s=max(timeout_s - _MARGIN_S, timeout_s / 2),
            )
            began_at = time.monotonic()
            try:
                parcel = self._acquaintances.peer(source.name).send(order, timeout_s=timeout_s)
                transport.receive(parcel, targets, sizes)
            except KVRayError as error:
                # Behind a fence whatever is under way fails, and the transport is none the worse.
                if is_of_the_way(error) and incarnation == doubts.incarnation:
                    source.obstacle = str(error)
                raise
        with source.lock:
            source.pace.note(piece.num_bytes, time.monotonic() - began_at)
        self._commit(source, piece, incarnation)

    def _commit(self, source: Source, piece: Piece, incarnation: int) -> None:
        """Make the blocks of a piece READY that have their checksums."""
        assert source.offer is not None
        sound = self._arena.sums(piece.reservation) == piece.checksums
        good = replace(piece.reservation, slots=piece.reservation.slots[sound])
        if not self._arena.commit(good, piece.checksums[sound]):
            self._arena.abort(piece.reservation)
            raise ShardUnavailable("The arena of this node stays locked; blocks were given up.")
        if not sound.all():
            bad = replace(piece.reservation, slots=piece.reservation.slots[~sound])
            self._doubts[source.offer.transport].add(bad, incarnation)
        num_good = int(np.count_nonzero(sound))
        with source.lock:
            source.num_blocks += num_good
            source.num_bytes += num_good * piece.size
            source.suspects += piece.blocks[~sound].tolist()
            source.ended_at = time.monotonic()
        with self._lock:
            self.num_blocks += num_good
            self.num_bytes += num_good * piece.size
            self.num_corrupt += len(sound) - num_good

    def _finish(self, source: Source) -> None:
        """Give back what a source's failure left unsent, and its leases; note how it went."""
        self._abort(source.pieces)
        if source.offer is not None:
            transport = source.offer.transport
            if source.num_blocks:
                incarnation = source.incarnations[transport]
                self._acquaintances.succeed(source.name, transport, incarnation)
            elif source.obstacle:
                self._acquaintances.fail(source.name, transport, source.obstacle)
            suspects = np.array(source.suspects, dtype="<u4").tobytes()
            with suppress(KVRayError):
                self._acquaintances.peer(source.name).release(
                    source.offer.token, suspects, timeout_s=self._settings.call_timeout_s
                )

    def _abort(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._arena.abort(piece.reservation)

    def _here(self, span: Span) -> int:
        """Return how many leading blocks of a span are READY here."""
        if not span.keys:
            return 0
        keys = np.frombuffer(span.keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
        with self._arena.section(_LOCK_WAIT_S) as entered:
            if not entered or self._arena.retired:
                return 0
            return lease.match(self._arena.tables, keys, [Wanted(span.part)])[0]


class _Flight:
    """Bytes on their way to this node: bounded, and waited for until a deadline."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._changed = threading.Condition()

    def enter(self, num_bytes: int, deadline: float) -> None:
        """Have so many bytes more in flight; a piece alone always may.

        Raises:
            TransferTimeout: there was no room before the deadline, or it is past.
        """
        _left(deadline, 0.0)
        with self._changed:
            while self._bytes and self._bytes + num_bytes > self._bytes_max:
                self._changed.wait(_left(deadline, 1.0))
            self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Have so many bytes less in flight."""
        with self._changed:
            self._bytes -= num_bytes
            self._changed.notify_all()


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls at once, the first in this thread: often it is the only one."""
    if not calls:
        return
    first, *others = calls
    with ThreadPoolExecutor(min(max(1, len(others)), _THREADS_MAX), "kvray-lane") as pool:
        futures = [pool.submit(one) for one in others]
        first()
        for future in futures:
            future.result()


def _left(deadline: float, longest_s: float) -> float:
    """Return the seconds until a deadline, or `longest_s` if that is shorter.

    Raises:
        TransferTimeout: there are none left.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("The blocks did not come in time; what is late is left out.")
    return min(left_s, longest_s)


def _equal_runs(sizes: Array) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of equal sizes."""
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)] if len(sizes) else []
    return pairwise(edges)
