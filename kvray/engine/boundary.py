"""Stops errors of the tier, and our own defects, so that the engine goes on without the tier.

An exception that leaves a connector's method ends its engine. So everything that may fail without
harm runs inside `Boundary.around`: all but what follows a promise.
"""

import logging
from collections import Counter

from kvray.errors import KVRayError

_log = logging.getLogger("kvray.connector")

_SAID_MAX = 256
_NO_DIGITS = str.maketrans("", "", "0123456789")


class Boundary:
    """Counts what it stops in `errors`, and logs each cause once; one for each engine."""

    def __init__(self, totals: Counter[str]) -> None:
        self._totals = totals
        self._said: set[str] = set()

    def around(self, what: str) -> "_Guard":
        """Return a context that stops any exception; the log says that `what` is lost."""
        return _Guard(self, what)

    def stop(self, what: str, error: BaseException) -> None:
        """Count `error`, and log it if its like was not logged before."""
        self._totals["errors"] += 1
        # Digits differ from request to request.
        cause = f"{what} {type(error).__name__} {error}".translate(_NO_DIGITS)
        if cause in self._said or len(self._said) >= _SAID_MAX:
            return
        self._said.add(cause)
        if isinstance(error, KVRayError):
            _log.warning("kvray: %s goes without the tier: %s (said once)", what, error)
        else:
            _log.error(
                "kvray: a defect; %s goes without the tier (said once)", what, exc_info=error
            )


class _Guard:
    def __init__(self, boundary: Boundary, what: str) -> None:
        self._boundary = boundary
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._boundary.stop(self._what, error)
        return True
