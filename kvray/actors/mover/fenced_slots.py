"""Reserved slots that a failed transfer may still write: fenced off until it cannot."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvray.errors import CapacityError, LeaseExpired, TransferError, TransportUnavailable
from kvray.store import Arena, Reservation
from kvray.transport import Transport

PATIENCE_S = 2.0
"""Recreating the endpoint ends running transfers, so it waits this long for them."""
_RENEWAL_S = 0.1
"""How long a fetch waits for a renewal. To register a large arena again may take a minute, in which
blocks come by another transport, or not at all."""
_NOTHING_SENT = (CapacityError, LeaseExpired, TransportUnavailable)
"""Errors of a source that has not begun to send."""


class FencedSlots:
    """The fenced slots of one transport. Thread-safe.

    A slot is fenced from a failed transfer until the receiving endpoint has been recreated.
    Meanwhile it is RESERVED, so nobody reads or reuses it. Each transfer belongs to the incarnation
    whose address its source has.
    """

    def __init__(self, arena: Arena, transport: Transport) -> None:
        self._arena = arena
        self._transport = transport
        self._lock = threading.Condition()
        self._is_renewing = False
        self.incarnation = 0
        """How often the transport's end was renewed."""
        self._num_transfers = 0
        self._fenced: list[tuple[Reservation, float]] = []
        """With the time since when each is fenced."""
        self._late: list[Reservation] = []
        """To be given back, but for an arena that was busy."""
        self.num_slots_total = 0

    @property
    def num_slots(self) -> int:
        """Slots that are fenced now, or wait for a busy arena."""
        with self._lock:
            return sum(len(one.slots) for one in (*self._late, *(one for one, _ in self._fenced)))

    def target(self) -> tuple[int, bytes]:
        """Return incarnation and address to send to; TransportUnavailable if there is none now."""
        with self._lock:
            if not self._lock.wait_for(lambda: not self._is_renewing, _RENEWAL_S):
                raise TransportUnavailable(
                    f"The transport {self._transport.name} is being renewed."
                )
            return self.incarnation, self._transport.address

    def is_current(self, incarnation: int) -> bool:
        """Return whether that is the incarnation now, and its end is not about to come."""
        with self._lock:
            return incarnation == self.incarnation and not self._is_renewing

    @contextmanager
    def transfer(self, incarnation: int, *reservations: Reservation) -> Iterator[None]:
        """Have reserved slots written during the `with` block; fence them if that fails.

        Slots are aborted if the source says that it sent nothing. `incarnation` is the one whose
        address the source has; once it has ended, this raises TransportUnavailable: the renewal
        fails what is under way, which says nothing of source or transport.
        """
        renewed = TransportUnavailable(
            f"The transport {self._transport.name} was renewed meanwhile; ask again."
        )
        with self._lock:
            is_current = self.is_current(incarnation)
            self._num_transfers += is_current
        if not is_current:
            self.give_back(*reservations)
            raise renewed
        try:
            yield
        except _NOTHING_SENT:
            self.give_back(*reservations)
            raise
        except BaseException as error:
            for one in reservations:
                self.add(one, incarnation)
            if isinstance(error, TransferError) and not self.is_current(incarnation):
                raise renewed from None
            raise
        finally:
            with self._lock:
                if incarnation == self.incarnation:
                    self._num_transfers -= 1

    def give_back(self, *reservations: Reservation) -> None:
        """Abort slots that nothing writes; those of a busy arena when `settle` comes."""
        for at, one in enumerate(reservations):
            if not self._arena.abort(one):
                with self._lock:
                    self._late += reservations[at:]
                return

    def add(self, reservation: Reservation, incarnation: int) -> None:
        """Fence the slots of a failed transfer, or abort them once nothing can write them."""
        if self._transport.writes_late:
            with self._lock:
                if incarnation == self.incarnation:
                    self.num_slots_total += len(reservation.slots)
                    self._fenced.append((reservation, time.monotonic()))
                    return
        self.give_back(reservation)

    def settle(self) -> None:
        """Renew the transport's end if slots are fenced, and free them.

        It waits while other transfers are under way, but no longer than `PATIENCE_S`.
        """
        with self._lock:
            late, self._late = self._late, []
        self.give_back(*late)
        with self._lock:
            if not self._fenced or self._is_renewing:
                return
            waited_s = time.monotonic() - self._fenced[0][1]
            if self._num_transfers and waited_s < PATIENCE_S:
                return
            self._is_renewing = True
        freed = []
        try:
            with suppress(
                TransportUnavailable
            ):  # the old end may not be gone: the next sweep tries
                self._transport.renew()
                freed = self._fenced
        finally:
            with self._lock:
                if freed:
                    self.incarnation += 1
                    self._num_transfers, self._fenced = 0, []
                self._is_renewing = False
                self._lock.notify_all()
        self.give_back(*(one for one, _ in freed))
