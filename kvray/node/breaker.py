"""When to leave a peer alone that did not answer: a circuit breaker; pure."""

import random

_FIRST_S = 0.25
_LAST_S = 8.0


class Breaker:
    """Open for a time after each failure, twice as long after each further one.

    The times are cut by up to a half, so that those who lost one peer do not come back as one.
    """

    def __init__(self, *, seed: int) -> None:
        """Start closed; `seed` decides by how much the times are cut."""
        self._random = random.Random(seed)
        self._backoff_s = _FIRST_S
        self._closed_at = 0.0

    def is_open(self, now: float) -> bool:
        """Whether the peer is to be left alone.

        Args:
            now: monotonic seconds.
        """
        return now < self._closed_at

    def fail(self, now: float) -> None:
        """Note that the peer did not answer."""
        self._closed_at = now + self._backoff_s * self._random.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, _LAST_S)

    def succeed(self) -> None:
        """Note that it answered."""
        self._backoff_s = _FIRST_S
