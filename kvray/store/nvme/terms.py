"""Plain data of the NVMe tier: an owner's request, the counts, what goes in and comes out.

`WriteBudget` bounds the writes to a device that wears out; it does no I/O but in `load` and `save`.
"""

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from kvray.errors import ConfigError
from kvray.store.arena.layout import Array, Geometry
from kvray.store.arena.slots import Reservation
from kvray.store.nvme.record import SegmentShape


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """An owner's figures for its NVMe tier; sizes in bytes."""

    cluster_name: str
    capacity: int  # of all segment files together, at most
    segment: int = 2**30
    """Payload of one segment file. Another value puts existing files aside."""
    slot_min: int = 64 * 2**10  # smallest slot; likewise
    free_reserve: int = 0  # of the file system, for others
    io_threads: int = 4  # transfers that one call runs at once
    group: str | None = None  # its members may open the files too; see `Access`

    def geometry(self) -> Geometry:
        """Return the figures of the tables; ConfigError: no segment fits, or sizes do not."""
        one = SegmentShape.of(self._geometry(1), self.slot_min).file_bytes
        geometry = self._geometry(self.capacity // one)
        if not geometry.is_valid:
            raise ConfigError(
                f"nvme.capacity ({self.capacity}) holds no file of nvme.segment ({self.segment}),"
                f" or that is no multiple of arena.slot_min ({self.slot_min}), or this none of"
                " 4096; change one of them."
            )
        return geometry

    def _geometry(self, num_segments: int) -> Geometry:
        return Geometry(
            capacity=num_segments * self.segment,
            slab_bytes=self.segment,
            slot_min=self.slot_min,
            holders_max=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demotion:
    """Blocks of one chain in an arena, and the slots of the store that they go to; one row each."""

    reservation: Reservation
    parents: Array  # key before each block, u64 [num_slots, 4]; zero at a root
    arena_slots: Array  # READY and leased by the caller until `write` ends


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStats:
    """Counts of a store since it was opened; sizes in bytes."""

    blocks: int
    block_bytes: int  # of the blocks that are here, with the rest of their last page
    segments: int
    file_bytes: int
    segments_without_room: int
    """Segments that the capacity allows and the disk has no room for."""
    stored: int
    evicted: int
    dropped: int
    corrupt: int
    unreadable: int  # blocks that the device refused to read
    written_bytes: int
    read_bytes: int
    is_direct: bool  # whether transfers go past the page cache


LEDGER_FILE = "written"

_DAY_S = 86400.0
_SAVED = 1 / 24  # share of a day's bytes that a quiet hour saves up for one write


class WriteBudget:
    """A day's bytes, given out evenly: any 24 hours spend no more.

    Times are seconds since 1970, because a restart must not give the same bytes twice. If the clock
    goes back, the next spending begins to count from there: it may have been wrong by years. One
    thread spends and saves; any may ask.
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
        return min(self._saved_max, saved + passed_s * self._per_s), now
