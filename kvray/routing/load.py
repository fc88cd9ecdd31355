"""The work that one replica has and had, as its router knows it; pure."""

from __future__ import annotations

import math
from collections.abc import Hashable

RECENT_S = 30.0
"""After this time a piece of work counts for 1/e of itself."""
_LATE = 0.25
"""Of the time that a request has run, what it still takes at least: predictions are often wrong,
and a replica where one hangs must not look idle."""


class Load:
    """Predicted work that was routed to a replica: what waits, and what lately came.

    A router sees a request's first token, and not when an engine began with it. The oldest request
    is taken to run since the first token of the one before.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, float] = {}
        self._waiting_s = 0.0
        self._began_at = 0.0
        """When the oldest of `_waiting` began to run."""
        self._recent_s = 0.0
        self._recent_at = 0.0

    def __len__(self) -> int:
        """Return how many requests have no first token yet."""
        return len(self._waiting)

    def queue_s(self, now: float) -> float:
        """Return how long a request that comes now waits for the others."""
        if not self._waiting:
            return 0.0
        oldest_s, ran_s = next(iter(self._waiting.values())), now - self._began_at
        left_s = min(oldest_s, max(oldest_s - ran_s, _LATE * ran_s))
        return max(0.0, self._waiting_s - oldest_s + left_s)

    def utilization(self, now: float) -> float:
        """Return the work that lately came for each second, older work counting less."""
        return self._recent_s * math.exp((self._recent_at - now) / RECENT_S) / RECENT_S

    def routed(self, request: Hashable, work_s: float, now: float) -> None:
        """Note a request that goes to this replica."""
        if not self._waiting:
            self._began_at = now
        self._waiting[request] = work_s
        self._waiting_s += work_s
        self._recent_s = self.utilization(now) * RECENT_S + work_s
        self._recent_at = now

    def done(self, request: Hashable, now: float) -> None:
        """Note a request's first token, or its failure; an unknown request is nobody's."""
        if request not in self._waiting:
            return
        if request == next(iter(self._waiting)):
            self._began_at = now
        work_s = self._waiting.pop(request)
        # Sums of floats drift; an empty queue is 0.
        self._waiting_s = self._waiting_s - work_s if self._waiting else 0.0
