"""Fetches of a mover: lease blocks at their sources, reserve slots, have them sent, check, commit.

Slots for the first blocks are reserved ahead, as the order expects them to be, and their sources
send them with the lease, in one call. The others get slots once they are leased, for the whole
order, parents before their children. Then each source gets lanes that fetch one piece after the
other: while one lane checks its piece, the other's is on its way.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvray.actors.mover.fenced_slots import FencedSlots
from kvray.actors.mover.orders import (
    FetchOrder,
    FetchReport,
    LeasedGroup,
    LeaseGroup,
    LeaseRequest,
    ReadLease,
    SendOrder,
    Span,
)
from kvray.actors.mover.peer_links import PeerLinks, RemoteMovers, is_link_error
from kvray.actors.mover.source import FIRST_BYTES, Pace, Piece, Source
from kvray.config import StagingConfig
from kvray.errors import CapacityError, KVRayError, TransferTimeout, TransportUnavailable
from kvray.identity.block import KEY_BYTES, BlockKey, split_keys
from kvray.store import Arena, Reservation
from kvray.store.arena import payload
from kvray.store.arena.layout import DEFAULT_PRIORITY, PRIORITY_MAX
from kvray.store.arena.tables import Array
from kvray.transport import Transport

NUM_LANES = 2
_THREADS_MAX = 32  # sources or lanes that run at once; the others wait for their turn

_AHEAD_BYTES = 4 * 2**20
_UNKNOWN_BYTES_PER_S, _MEASURED_BYTES = 2**20, 2**18
_AHEAD_SHARE = 0.25
"""Blocks of an order get slots ahead up to so many bytes, and no more of them than a source sent in
this share of a call's time lately: they come all together, or not at all. Of a source that was
never asked one does, whatever its size."""
_LOCK_WAIT_S = 0.5
_MARGIN_S = 0.1
"""A source gives up this much earlier than the asker, so that its reason arrives."""


class Fetches:
    """The receiving side of a mover. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        transports: Mapping[str, Transport],
        fenced: Mapping[str, FencedSlots],
        links: PeerLinks,
        *,
        movers: RemoteMovers,
        settings: StagingConfig,
    ) -> None:
        """`transports` are by name, the best first."""
        self._arena = arena
        self._transports = transports
        self._fenced = fenced
        self._links = links
        self._movers = movers
        self._settings = settings
        self._in_flight = {
            name: _BytesInFlight(
                min(settings.bytes_in_flight, one.bytes_max or settings.bytes_in_flight)
            )
            for name, one in transports.items()
        }
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        """Source -> bytes a second of its last fetch, small ones apart; 0: it failed."""
        self.num_bytes = 0
        self.num_blocks = 0
        self.num_corrupt = 0

    def fetch(self, order: FetchOrder, *, deadline: float) -> FetchReport:
        """Fetch the blocks of an order; as `Mover.fetch`."""
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
        if order.purpose == "use":
            for span in reversed(order.spans):  # the first are worth most, and go last
                self._arena.note_use(split_keys(span.keys), span.part)
        return FetchReport(
            here=tuple(self._here(span) for span in order.spans),
            sources={name: one.report() for name, one in sources.items()},
        )

    def _fetch_from(
        self, sources: Mapping[str, Source], order: FetchOrder, deadline: float
    ) -> None:
        seconds = min(deadline - time.monotonic(), self._settings.call_timeout_s)
        self._reserve_ahead(order, sources, seconds)
        _at_once([partial(self._begin, one, order, deadline) for one in sources.values()])
        self._reserve(order, sources)
        now = time.monotonic()
        for one in sources.values():
            if one.pieces:  # it has waited for the others since
                one.began_at += now - one.leased_at
        _at_once(
            [
                partial(self._run_lane, one, deadline)
                for one in sources.values()
                if one.pieces
                for _ in range(NUM_LANES if one.left_bytes > FIRST_BYTES else 1)
            ]
        )

    def _reserve_ahead(
        self, order: FetchOrder, sources: Mapping[str, Source], seconds: float
    ) -> None:
        """Reserve slots for the first blocks, as the order expects them to be."""
        left_bytes = _AHEAD_BYTES if self._fenced else 0
        in_time = {
            name: _AHEAD_SHARE * seconds * self._rates.get(name, _UNKNOWN_BYTES_PER_S)
            for name in sources
        }
        for index, span in enumerate(order.spans):
            source = sources.get(span.source)
            if source is None or index not in source.spans or not span.block_bytes:
                continue
            count = max(0, int(min(left_bytes, in_time[span.source]))) // span.block_bytes
            is_known = span.source in self._rates or source.ahead
            if not is_known and span.block_bytes <= left_bytes:
                count = max(1, count)
            keys = split_keys(span.keys)[:count]
            left_bytes -= len(keys) * span.block_bytes
            in_time[span.source] -= len(keys) * span.block_bytes
            with suppress(KVRayError):  # the source's answer says how they really are
                if keys and (made := self._slots_for(span, keys, 0, span.block_bytes)) is not None:
                    source.ahead[index] = made

    def _begin(self, source: Source, order: FetchOrder, deadline: float) -> None:
        with source.failing():
            self._lease(source, order, deadline)

    def _lease(self, source: Source, order: FetchOrder, deadline: float) -> None:
        """Lease the blocks of a source, which sends those that have slots ahead with the lease."""
        addresses = {}
        for name in self._links.transports_for(source.name):
            with suppress(KVRayError):
                source.incarnations[name], addresses[name] = self._fenced[name].target()
        if not addresses:
            raise TransportUnavailable("This node has no transport that works now; ask again.")
        best = next(iter(addresses))
        spans = [order.spans[index] for index in source.spans]
        ahead = [source.ahead.get(index) for index in source.spans]
        num_bytes = sum(
            span.block_bytes * len(made.slots)
            for span, made in zip(spans, ahead, strict=True)
            if made is not None
        )
        self._in_flight[best].enter(num_bytes, deadline)
        try:
            timeout_s = _left(deadline, self._settings.call_timeout_s)
            request = LeaseRequest(
                groups=tuple(map(self._group, spans, ahead)),
                lease_s=self._settings.lease_s,
                addresses=addresses,
                timeout_s=max(timeout_s - _MARGIN_S, timeout_s / 2),
                is_use=order.purpose == "prompt",
            )
            slots, source.ahead = tuple(source.ahead.values()), {}
            with self._receiving(source, best, *slots):
                lease = self._movers.lease(source.name, request, timeout_s=timeout_s)
                pieces = [
                    _sent(made, leased, span.block_bytes)
                    for span, made, leased in zip(spans, ahead, lease.groups, strict=True)
                    if made is not None
                ]
                if any(len(piece.blocks) for piece, _ in pieces):
                    self._receive(self._transports[best], lease.parcel, *(one for one, _ in pieces))
        finally:
            self._in_flight[best].leave(num_bytes)
        source.lease, source.leased_at = lease, time.monotonic()
        source.pace = Pace(most_bytes=self._transports[lease.transport].piece_bytes)
        for piece, unsent in pieces:
            self._give_back(unsent)
            with source.failing():
                self._commit(source, piece, source.incarnations[best])

    def _group(self, span: Span, ahead: Reservation | None) -> LeaseGroup:
        """Return what to lease of a span, with the targets of its slots that are reserved ahead."""
        group = LeaseGroup(part=span.part, keys=span.keys)
        if ahead is None or not len(ahead.slots):
            return group
        targets = np.full(int(ahead.rows[-1]) + 1, -1, dtype="<i8")
        targets[ahead.rows] = self._offsets(ahead, span.block_bytes)
        return replace(
            group,
            block_bytes=span.block_bytes,
            namespace=span.namespace,
            targets=targets.tobytes(),
        )

    def _reserve(self, order: FetchOrder, sources: Mapping[str, Source]) -> None:
        """Reserve slots for all leased blocks, in the order of the spans."""
        starts = dict.fromkeys(sources, 0)
        for index, span in enumerate(order.spans):
            source = sources.get(span.source)
            if source is None or source.lease is None or index not in source.spans:
                continue
            if not source.lease.token:  # it has sent everything
                continue
            leased = source.lease.groups[source.spans.index(index)]
            with source.failing():
                source.pieces += self._pieces(span, leased, starts[span.source])
            starts[span.source] += len(leased.sizes)

    def _pieces(self, span: Span, leased: LeasedGroup, start: int) -> list[Piece]:
        """Reserve slots for the leased head of a span; return the pieces that fill them.

        The first of the `leased` blocks has the place `start` in the read lease.
        """
        sizes, checksums = leased.sizes, leased.checksums
        keys = split_keys(span.keys[: len(sizes) * KEY_BYTES])
        pieces: list[Piece] = []
        for first, stop in payload.runs(np.diff(sizes) != 0, len(sizes)):
            size = int(sizes[first])
            made = self._slots_for(
                replace(span, namespace=int(leased.namespaces[first])),
                keys[:stop],
                first,
                size,
                leased.priorities[first:stop].clip(max=PRIORITY_MAX),
            )
            if made is None:
                self._abort(pieces)
                raise CapacityError("The arena of this node is busy or retired.")
            if len(made.slots):
                rows = made.rows + first
                blocks = (rows + start).astype("<u4")
                pieces.append(Piece(blocks, replace(made, rows=rows), checksums[rows], size))
            if made.dropped:
                break
        return pieces

    def _slots_for(
        self,
        span: Span,
        keys: Sequence[BlockKey],
        first: int,
        block_bytes: int,
        priority: int | Array = DEFAULT_PRIORITY,
    ) -> Reservation | None:
        """Reserve slots for `keys`, the leading ones of a span, from the `first` on."""
        before = BlockKey(span.parent) if span.parent else None
        return self._arena.reserve(
            keys[first:],
            parent=keys[first - 1] if first else before,
            depth=span.depth + first,
            head=span.head,
            part=span.part,
            block_bytes=block_bytes,
            namespace=span.namespace,
            priority=priority,
            needs_parent=span.needs_parent or first > 0,
            wait_s=_LOCK_WAIT_S,
        )

    def _run_lane(self, source: Source, deadline: float) -> None:
        assert source.lease is not None, "only leased blocks make pieces"
        in_flight = self._in_flight[source.lease.transport]
        while (piece := source.take()) is not None:
            with source.failing():
                # One that the deadline cuts off has this node's end renewed, which ends all others.
                takes_s = source.pace.seconds and source.pace.seconds + _MARGIN_S
                try:
                    in_flight.enter(piece.num_bytes, deadline - takes_s)
                except CapacityError:  # nothing was sent
                    self._abort([piece])
                    raise
                try:
                    self._fetch_piece(source, source.lease, piece, deadline)
                finally:
                    in_flight.leave(piece.num_bytes)

    def _fetch_piece(self, source: Source, lease: ReadLease, piece: Piece, deadline: float) -> None:
        """Have one piece sent and commit it, or fence its slots."""
        began_at = time.monotonic()
        with self._receiving(source, lease.transport, piece.reservation):
            timeout_s = _left(deadline, self._settings.lease_s)
            order = SendOrder(
                token=lease.token,
                blocks=piece.blocks.astype("<u4").tobytes(),
                targets=self._offsets(piece.reservation, piece.size).tobytes(),
                timeout_s=max(timeout_s - _MARGIN_S, timeout_s / 2),
            )
            parcel = self._movers.send(source.name, order, timeout_s=timeout_s)
            self._receive(self._transports[lease.transport], parcel, piece)
        with source.lock:
            source.pace.note(piece.num_bytes, time.monotonic() - began_at)
        self._commit(source, piece, source.incarnations[lease.transport])

    @contextmanager
    def _receiving(
        self, source: Source, transport: str, *reservations: Reservation
    ) -> Iterator[None]:
        """Have a source write slots during the `with` block; if that fails, they are fenced."""
        fenced, incarnation = self._fenced[transport], source.incarnations[transport]
        with source.lock:
            source.began_at = source.began_at or time.monotonic()
        try:
            with fenced.transfer(incarnation, *reservations):
                yield
        except KVRayError as error:
            if is_link_error(error):
                source.link_error = transport, str(error)
            raise

    def _receive(self, transport: Transport, parcel: Any, *pieces: Piece) -> None:
        """Put the blocks of some pieces in place, which one parcel has brought."""
        targets = [self._offsets(one.reservation, one.size) for one in pieces]
        sizes = np.repeat([one.size for one in pieces], [len(one.blocks) for one in pieces])
        transport.receive(parcel, np.concatenate(targets), sizes)

    def _offsets(self, reservation: Reservation, block_bytes: int) -> Array:
        """Return where in the arena the slots begin, i64."""
        return payload.offsets(self._arena.tables, reservation.slots, block_bytes).astype("<i8")

    def _commit(self, source: Source, piece: Piece, incarnation: int) -> None:
        """Make those blocks of a piece READY that have their checksums."""
        assert source.lease is not None
        valid = self._arena.sums(piece.reservation) == piece.checksums
        good = piece.reservation.only(valid)
        if not self._arena.commit(good, piece.checksums[valid]):
            self._give_back(piece.reservation)
            raise CapacityError("The arena of this node stays locked; blocks were given up.")
        if not valid.all():
            bad = piece.reservation.only(~valid)
            tables = self._arena.tables
            source.suspects += [
                (int(tables.slot_part[slot]), tables.slot_key[slot].tobytes()) for slot in bad.slots
            ]
            self._fenced[source.lease.transport].add(bad, incarnation)
        num_good = int(np.count_nonzero(valid))
        with source.lock:
            source.num_blocks += num_good
            source.num_bytes += num_good * piece.size
            source.ended_at = time.monotonic()
        with self._lock:
            self.num_blocks += num_good
            self.num_bytes += num_good * piece.size
            self.num_corrupt += len(valid) - num_good

    def _finish(self, source: Source) -> None:
        """Free the slots that were not filled, end the read lease, and note the link's result."""
        report = source.report()
        if report.error:
            self._rates[source.name] = 0.0
        elif report.num_bytes >= _MEASURED_BYTES and report.seconds:
            self._rates[source.name] = report.num_bytes / report.seconds
        elif report.num_bytes and self._rates.get(source.name) == 0.0:
            del self._rates[source.name]  # it works again, how fast is not known
        self._abort(source.pieces)
        self._give_back(*source.ahead.values())
        if source.link_error and not source.num_blocks:
            self._links.fail(source.name, *source.link_error)
        if source.lease is None:
            return
        if source.num_blocks:
            transport = source.lease.transport
            self._links.succeed(source.name, transport, source.incarnations[transport])
        if source.lease.token or source.suspects:
            with suppress(KVRayError):
                self._movers.release(
                    source.name,
                    source.lease.token,
                    source.suspects,
                    timeout_s=self._settings.call_timeout_s,
                )

    def _give_back(self, *reservations: Reservation) -> None:
        if reservations:  # slots are given back by whichever transport's part
            next(iter(self._fenced.values())).give_back(*reservations)

    def _abort(self, pieces: Iterable[Piece]) -> None:
        self._give_back(*(piece.reservation for piece in pieces))

    def _here(self, span: Span) -> int:
        """Return how many leading blocks of a span are READY here."""
        (here,) = self._arena.present(split_keys(span.keys), [span.part])
        return int(np.append(here, False).argmin())


class _BytesInFlight:
    """The bytes on their way to this node: bounded; a wait for room ends with its deadline."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._changed = threading.Condition()

    def enter(self, num_bytes: int, deadline: float) -> None:
        """Add bytes as soon as there is room; a piece alone always has it.

        CapacityError: there was no room before the deadline. No source is to blame for that.
        """
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: not self._bytes or self._bytes + num_bytes <= self._bytes_max,
                deadline - time.monotonic(),
            )
            if not has_room or time.monotonic() >= deadline:
                raise CapacityError("This node had no time or room left for more blocks.")
            self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        with self._changed:
            self._bytes -= num_bytes
            self._changed.notify_all()


def _sent(made: Reservation, leased: LeasedGroup, size: int) -> tuple[Piece, Reservation]:
    """Return the piece of slots that were filled with the lease, and the other slots."""
    is_sent = made.rows < (len(leased.sizes) if leased.was_sent else 0)
    filled = made.only(is_sent)
    return Piece(filled.rows, filled, leased.checksums[filled.rows], size), made.only(~is_sent)


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Run all calls at once, the first in this thread: often it is the only one."""
    if not calls:
        return
    first, *others = calls
    with ThreadPoolExecutor(min(max(1, len(others)), _THREADS_MAX), "kvray-lane") as pool:
        futures = [pool.submit(one) for one in others]
        first()
        for future in futures:
            future.result()


def _left(deadline: float, longest_s: float) -> float:
    """Return the seconds to a deadline, at most `longest_s`; TransferTimeout if none are left."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("The blocks did not arrive in time; late ones are left out.")
    return min(left_s, longest_s)
