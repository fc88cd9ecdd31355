"""Bounds the writes to a device that wears out; pure except for `load` and `save`."""

import contextlib
import json
import math
import os
from pathlib import Path

LEDGER_FILE = "written"

_DAY_S = 86400.0
_SAVED = 1 / 24  # share of a day's bytes that a quiet hour saves up for one write


class WriteBudget:
    """A day's bytes, given out evenly: any 24 hours spend no more.

    Times are seconds since 1970, because a restart must not give the same bytes twice. If the clock
    goes back, nothing is given until it has caught up. One thread spends and saves; any may ask.
    """

    def __init__(self, bytes_per_day: float | None, *, now: float) -> None:
        """Begin with as much as can be saved up; None: no limit."""
        self.bytes_per_day = bytes_per_day
        # The savings count towards the day: the rest of it comes evenly.
        self._saved_max = (bytes_per_day or 0.0) * _SAVED
        self._per_s = (bytes_per_day or 0.0) * (1 - _SAVED) / _DAY_S
        # The savings and their time: replaced together, for other threads that ask meanwhile.
        self._state = (self._saved_max, now)

    def available(self, now: float) -> int | None:
        """Return how many bytes may be written now; None: any number."""
        return None if self.bytes_per_day is None else max(0, int(self._at(now)[0]))

    def spend(self, num_bytes: int, now: float) -> None:
        """Note written bytes. They may exceed the savings; then the next write waits longer."""
        if self.bytes_per_day is not None:
            saved, at = self._at(now)
            self._state = saved - num_bytes, at

    def load(self, directory: Path) -> None:
        """Continue from the ledger of an earlier process; without one, start as new."""
        now = self._state[1]
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads((directory / LEDGER_FILE).read_text())
            saved, at = float(noted["saved"]), float(noted["at"])
            if math.isfinite(saved) and math.isfinite(at):
                self._state = min(self._saved_max, saved), min(at, now)
                self._state = self._at(now)

    def save(self, directory: Path) -> None:
        """Leave a ledger for the next process; if there is no room, it starts as new."""
        if self.bytes_per_day is None:
            return
        with contextlib.suppress(OSError):
            draft = directory / f"{LEDGER_FILE}.new"
            saved, at = self._state
            draft.write_text(json.dumps({"saved": saved, "at": at}))
            os.replace(draft, directory / LEDGER_FILE)

    def _at(self, now: float) -> tuple[float, float]:
        """Return the savings at `now`, and the time from which they count."""
        saved, at = self._state
        passed_s = max(0.0, now - at)
        return min(self._saved_max, saved + passed_s * self._per_s), max(at, now)
