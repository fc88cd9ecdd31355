"""A circuit breaker: a silent peer is left alone for a while, then tried once; pure."""

from random import Random

_FIRST_S = 0.25
_LONGEST_S = 8.0
_PROBE_S = 12.0  # a probe unanswered for this long has failed


class Breaker:
    """Whether one peer is worth a call; not for several threads at once.

    It opens at a failure, twice as long for each further one. Each time is shortened by up to a
    half at random, so that peers do not all come back at once. Then it is half open: one call may
    try, and its result decides.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._failures = 0
        self._open_until = 0.0
        self._probe_until = 0.0
        self.error: str = ""  # the last failure; empty once the peer has answered

    def state(self, now: float) -> str:
        """Return `closed`, `half-open` (one call may try) or `open` (no call)."""
        if not self._failures:
            return "closed"
        return "open" if now < max(self._open_until, self._probe_until) else "half-open"

    def begin(self, now: float) -> None:
        """Note that a call is made; the only one for now if the breaker is half open."""
        if self._failures:
            self._probe_until = now + _PROBE_S

    def succeed(self) -> None:
        """Note that the peer answered."""
        self._failures, self._open_until, self._probe_until, self.error = 0, 0.0, 0.0, ""

    def fail(self, now: float, error: str) -> None:
        """Note that the peer did not answer, or broke off."""
        # A failure of a call made before the breaker opened says nothing new.
        if now >= self._open_until:
            pause = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._failures, 16))
            self._open_until = now + pause * (0.5 + self._random.random() / 2)
            self._failures += 1
        self._probe_until = 0.0
        self.error = error
