"""How fast this engine computes prompts, measured from its passes; pure.

Staging is worth while only if it is faster than computing. The leader hears of a pass when it is
planned, never when it ends, so a pass is taken to last until the next is planned, if the engine
goes straight on: if the next pass has a request of this one. An engine that overlaps plans the
next pass while this one still runs, and the time shows one pass later; so the longer of the two
that follow counts.
"""

from collections.abc import Collection

_TOKENS_MIN = 128
"""Passes of fewer tokens tell more of what a pass costs than of what a token costs."""
_KEEP = 0.8
"""What is left of the sums after each further measurement."""


class PrefillRate:
    """Tokens per second, the latest passes and the largest counting most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._requests: set[int] = set()
        self._planned_at = 0.0
        self._pending: tuple[int, float] | None = None
        """Tokens of the pass before the last, and how long it was until the last was planned."""
        self._last_tokens = 0

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 while it is unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def plan(self, requests: Collection[int], num_tokens: int, now: float) -> None:
        """Note a pass of `requests` that computes `num_tokens` in all, planned at `now`."""
        goes_on = not self._requests.isdisjoint(requests)
        seconds = now - self._planned_at
        if goes_on and self._pending is not None:
            tokens, before = self._pending
            longer = max(before, seconds)
            if longer > 0:
                self._tokens = _KEEP * self._tokens + tokens
                self._seconds = _KEEP * self._seconds + longer
        big = goes_on and self._last_tokens >= _TOKENS_MIN
        self._pending = (self._last_tokens, seconds) if big else None
        self._requests, self._last_tokens, self._planned_at = set(requests), num_tokens, now
