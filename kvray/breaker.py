"""A circuit breaker: what does not answer is left alone for a while, then tried once; pure."""

from random import Random

_FIRST_S = 0.25
_LONGEST_S = 8.0
_PROBE_S = 12.0
"""A probe of which nothing was heard for so long is none any more."""


class Breaker:
    """What is known of one peer's willingness to answer; not for several threads at once.

    It opens at a failure, twice as long for each one after another, shortened by up to a half at
    random so that peers do not all come back at once. When that time is over it is half open: one
    call may try, and decides.
    """

    def __init__(self, random: Random) -> None:
        """Start closed."""
        self._random = random
        self._failures = 0
        self._open_until = 0.0
        self._probe_until = 0.0
        self.error: str = ""
        """What failed last; empty since it answered."""

    def state(self, now: float) -> str:
        """Return `closed`, `half-open` (one call may try) or `open` (no call)."""
        if not self._failures:
            return "closed"
        return "open" if now < max(self._open_until, self._probe_until) else "half-open"

    def begin(self, now: float) -> None:
        """A call is made; the only one for now if it is half open."""
        if self._failures:
            self._probe_until = now + _PROBE_S

    def succeed(self) -> None:
        """It answered."""
        self._failures, self._open_until, self._probe_until, self.error = 0, 0.0, 0.0, ""

    def fail(self, now: float, error: str) -> None:
        """It did not answer, or broke off what it had begun."""
        # A failure of a call made before the breaker opened says nothing new.
        if now >= self._open_until:
            pause = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._failures, 16))
            self._open_until = now + pause * (0.5 + self._random.random() / 2)
            self._failures += 1
        self._probe_until = 0.0
        self.error = error
