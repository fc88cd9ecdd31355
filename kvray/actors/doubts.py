"""Reserved slots that a transfer which failed may still write: kept until it cannot."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvray.errors import LeaseExpired, TransportUnavailable
from kvray.store import Arena, Reservation
from kvray.transport import Transport

PATIENCE_S = 2.0
"""How long slots stay in doubt for the sake of other transfers, which the fence ends."""


@dataclass(frozen=True, slots=True)
class _Doubt:
    reservation: Reservation
    incarnation: int
    since: float


class Doubts:
    """The doubtful slots of one transport, and its fence. Thread-safe.

    A slot is in doubt from the failure of its transfer on until the end that it was sent to has
    been renewed; it stays RESERVED so long, and nobody reads or reuses it. A transfer is a
    passenger of the incarnation whose address its source has.
    """

    def __init__(self, arena: Arena, transport: Transport) -> None:
        """Guard what `transport` writes into `arena`."""
        self._arena = arena
        self._transport = transport
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._incarnation = 0
        self._passengers = 0
        self._doubts: list[_Doubt] = []
        self.num_slots_total = 0

    @property
    def num_slots(self) -> int:
        """Slots that are in doubt now."""
        with self._lock:
            return sum(len(doubt.reservation.slots) for doubt in self._doubts)

    @property
    def incarnation(self) -> int:
        """How often the transport's end was renewed."""
        return self._incarnation

    def target(self) -> tuple[int, bytes]:
        """Return incarnation and address to have something sent to.

        Raises:
            TransportUnavailable: this end has none at present.
        """
        with self._renewing, self._lock:
            return self._incarnation, self._transport.address

    @contextmanager
    def passage(self, reservation: Reservation, incarnation: int) -> Iterator[None]:
        """Have reserved slots written for the time of a block; if that fails, they are in doubt.

        Args:
            reservation: the slots; given back if nothing was sent.
            incarnation: whose address the source has.

        Raises:
            TransportUnavailable: that incarnation was ended.
        """
        with self._renewing, self._lock:
            is_current = incarnation == self._incarnation
            self._passengers += is_current
        if not is_current:
            self._arena.abort(reservation)
            raise TransportUnavailable(
                f"The transport {self._transport.name} was begun anew meanwhile; ask again."
            )
        try:
            yield
        except LeaseExpired:  # the source had nothing to send
            self._arena.abort(reservation)
            raise
        except BaseException:
            self.add(reservation, incarnation)
            raise
        finally:
            with self._lock:
                if incarnation == self._incarnation:
                    self._passengers -= 1

    def add(self, reservation: Reservation, incarnation: int) -> None:
        """Give up reserved slots whose transfer failed."""
        if self._transport.writes_late:
            with self._lock:
                if incarnation == self._incarnation:
                    self.num_slots_total += len(reservation.slots)
                    self._doubts.append(_Doubt(reservation, incarnation, time.monotonic()))
                    return
        self._arena.abort(reservation)

    def settle(self, *, at_once: bool = False) -> None:
        """Renew the transport's end if slots are in doubt, and give them back behind the fence.

        Nothing is done while other transfers are under way, but not for longer than `PATIENCE_S`.

        Args:
            at_once: end other transfers, however short the doubt.
        """
        with self._renewing:
            with self._lock:
                if not self._doubts:
                    return
                waited_s = time.monotonic() - self._doubts[0].since
                if self._passengers and waited_s < PATIENCE_S and not at_once:
                    return
            try:
                self._transport.renew()
            except TransportUnavailable:
                return  # the old end may not be gone either; the next sweep tries again
            with self._lock:
                self._incarnation += 1
                self._passengers = 0
                settled, self._doubts = self._doubts, []
        for doubt in settled:
            if not self._arena.abort(doubt.reservation):
                with self._lock:
                    self._doubts.append(doubt)
