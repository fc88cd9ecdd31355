"""Lets the faults of a schedule strike when they can, and undoes them."""

import heapq
import time
from collections.abc import Callable, Sequence

from kvray.errors import KVRayError
from kvray.lab.chaos.judge import IN_FLIGHT_MIN, Strike
from kvray.lab.chaos.schedule import Fault


class NotNow(KVRayError):
    """The fault has no target now, or too few requests are in flight; it may be tried again."""

    patience_s = 15.0
    """How long it is tried."""


class NotYet(NotNow):
    """The fault has begun, by a process that takes its time to start on a busy machine."""

    patience_s = 90.0


class Campaign:
    """A schedule under way: call `advance` often. A fault that waits holds up no other."""

    def __init__(
        self,
        schedule: Sequence[Fault],
        strike: Callable[[Fault], None],
        end: Callable[[Fault], None],
        in_flight: Callable[[], int],
        *,
        ends_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now.

        Args:
            schedule: in the order of their times.
            strike: makes a fault happen, or raises `NotNow`.
            end: undoes a fault, and the preparations for it. Twice is fine.
            in_flight: returns how many requests wait for an answer.
            ends_s: seconds from now; after that no fault strikes or lasts.
            now: returns monotonic seconds.
        """
        self.strikes: list[Strike] = []
        """The result of each fault so far."""
        self._strike = strike
        self._end = end
        self._in_flight = in_flight
        self._now = now
        self._began = now()
        self._ends = self._began + ends_s
        self._coming = list(reversed(schedule))
        self._due: list[Fault] = []
        self._endings: list[tuple[float, int, Fault]] = []

    def advance(self) -> None:
        """Undo the faults that are over, and let those strike that are due."""
        while self._endings and self._endings[0][0] <= self._now():
            self._end(heapq.heappop(self._endings)[2])
        while self._coming and self._began + self._coming[-1].strikes_s <= self._now():
            self._due.append(self._coming.pop())
        self._due = [fault for fault in self._due if not self._is_done_with(fault)]

    def _is_done_with(self, fault: Fault) -> bool:
        """Let a fault strike if it can; return whether it did, or is given up."""
        now, in_flight = self._now(), self._in_flight()
        ended, skipped = now, None
        try:
            if in_flight < IN_FLIGHT_MIN:
                raise NotNow(f"Fewer than {IN_FLIGHT_MIN} requests were in flight.")
            self._strike(fault)
        except NotNow as error:
            if now < min(self._began + fault.strikes_s + error.patience_s, self._ends):
                return False
            self._end(fault)
            skipped = str(error)
        else:
            # The strike itself may take long; the fault lasts its whole length after it.
            ended = max(now, min(self._now() + fault.ends_s - fault.strikes_s, self._ends))
            heapq.heappush(self._endings, (ended, fault.number, fault))
        self.strikes.append(
            Strike(kind=fault.kind, began=now, ended=ended, in_flight=in_flight, skipped=skipped)
        )
        return True
