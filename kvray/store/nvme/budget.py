"""How much may be written to a device that wears out; pure but for `load` and `save`."""

import contextlib
import json
import os
from pathlib import Path

LEDGER_FILE = "written"

_DAY_S = 86400.0
_SAVED = 1 / 24
"""Share of a day's bytes that can be saved up, and be written at once after a quiet hour."""


class WriteBudget:
    """A day's bytes, given out evenly: in any 24 hours no more than these are spent.

    Times are seconds since 1970, because a restart must not give the same bytes twice. A clock that
    is put back costs the time until it has caught up.
    """

    def __init__(self, bytes_per_day: float | None, *, now: float) -> None:
        """Begin with as much as can be saved up; None: without bounds."""
        self.bytes_per_day = bytes_per_day
        # What is saved up counts towards the day: the rest of it comes evenly.
        self._saved_max = (bytes_per_day or 0.0) * _SAVED
        self._per_s = (bytes_per_day or 0.0) * (1 - _SAVED) / _DAY_S
        self._saved = self._saved_max
        self._at = now

    def available(self, now: float) -> int | None:
        """Return how many bytes may be written now; None: any number."""
        if self.bytes_per_day is None:
            return None
        self._advance(now)
        return max(0, int(self._saved))

    def spend(self, num_bytes: int, now: float) -> None:
        """Note what was written, be it more than was there: it is made up for before the next."""
        if self.bytes_per_day is not None:
            self._advance(now)
            self._saved -= num_bytes

    def load(self, directory: Path) -> None:
        """Go on where a process before has stopped; without a ledger that can be read, as new."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads((directory / LEDGER_FILE).read_text())
            self._saved, at = min(self._saved_max, float(noted["saved"])), float(noted["at"])
            if at <= self._at:
                before, self._at = self._at, at
                self._advance(before)

    def save(self, directory: Path) -> None:
        """Leave a ledger for the next process; without room for it, it begins as new."""
        if self.bytes_per_day is None:
            return
        with contextlib.suppress(OSError):
            draft = directory / f"{LEDGER_FILE}.new"
            draft.write_text(json.dumps({"saved": self._saved, "at": self._at}))
            os.replace(draft, directory / LEDGER_FILE)

    def _advance(self, now: float) -> None:
        passed_s = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._saved = min(self._saved_max, self._saved + passed_s * self._per_s)
