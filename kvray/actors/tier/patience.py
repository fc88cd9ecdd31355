"""How long a wait goes on: while something moves, since a busy machine is slow and not stuck."""

import time

_MOST_S = 900.0


class Patience:
    """Ends a wait in which nothing has moved for `still_s`, or that takes `most_s` in all."""

    def __init__(self, still_s: float, *, most_s: float = _MOST_S) -> None:
        """Begin to wait now."""
        self._still_s = still_s
        self._seen: object = None
        self._moved_at = time.monotonic()
        self._until = self._moved_at + most_s

    def is_over(self, seen: object, *, still_s: float | None = None) -> bool:
        """Return whether to give up; `seen` differs from the last call's if something has moved.

        `still_s` replaces the wait's own for this look.
        """
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        return now > min(self._moved_at + (still_s or self._still_s), self._until)
