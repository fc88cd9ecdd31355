"""The one place where errors of the tier, and our own defects, end: the engine goes on without.

Whatever leaves a connector's method ends its engine. So all that may fail without harm, which is
everything but what follows a promise, is done inside `Boundary.around`.
"""

import logging
from collections import Counter
from types import TracebackType

from kvray.errors import KVRayError

_log = logging.getLogger("kvray.connector")

_SAID_MAX = 256
_NO_DIGITS = str.maketrans("", "", "0123456789")


class Boundary:
    """One engine's; it counts what it stops in `errors` and says each cause once."""

    def __init__(self, totals: Counter[str]) -> None:
        """Count in `totals`."""
        self._totals = totals
        self._said: set[str] = set()

    def around(self, what: str) -> "_Guard":
        """Return a context in which any exception ends; `what` tells people what is lost."""
        return _Guard(self, what)

    def stop(self, what: str, error: Exception) -> None:
        """Count `error`, and log it if its like was not logged before."""
        self._totals["errors"] += 1
        # Without the digits, which are another request's each time.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._boundary.stop(self._what, error)
        return True
