"""The records of all slots, as they are or soon will be on disk, and the pages to write.

The user of a `RecordTable` holds the store's lock. A page is copied under it and written without
it. So the lock is never held over I/O, and no record changes while the device reads it.
"""

from typing import NamedTuple

import numpy as np

from kvray.store.arena.layout import Array, Geometry, align
from kvray.store.nvme.disk import aligned
from kvray.store.nvme.record import RECORD, RECORDS_PER_PAGE


class Pages(NamedTuple):
    """Pages of one segment's table that must be written."""

    slab: int
    pages: Array  # their indices, ascending
    records: Array  # RECORD, shape [num_pages, RECORDS_PER_PAGE]; a copy, page-aligned


class RecordTable:
    """One record a slot; all zero where there is no block."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        rows = align(geometry.slots_per_slab, RECORDS_PER_PAGE)
        memory = aligned(geometry.num_slabs * rows * RECORD.itemsize)
        self._tables: Array = memory.view(RECORD).reshape(geometry.num_slabs, rows)
        self._dirty = np.zeros((geometry.num_slabs, rows // RECORDS_PER_PAGE), dtype=bool)

    def table(self, slab: int) -> Array:
        """Return a slab's records, whole pages, for its file to fill."""
        table: Array = self._tables[slab]
        return table

    def records(self, slots: Array) -> Array:
        """Return copies of the records of `slots`."""
        found: Array = self._tables[self._geometry.place_of(slots)]
        return found

    def put(self, slots: Array, records: Array) -> None:
        """Have `records` written for `slots`."""
        slab, row = self._geometry.place_of(slots)
        self._tables[slab, row] = records
        self._dirty[slab, row // RECORDS_PER_PAGE] = True

    def bury(self, slots: Array) -> None:
        """Have the records of `slots` written as empty, where they are not."""
        self.bury_rows(*self._geometry.place_of(slots))

    def bury_rows(self, slab: Array, row: Array) -> None:
        """Do so for the records in these rows of the slabs' tables."""
        named = self._tables["sequence"][slab, row] > 0
        slab, row = slab[named], row[named]
        self._tables[slab, row] = np.zeros((), dtype=RECORD)
        self._dirty[slab, row // RECORDS_PER_PAGE] = True

    def forget(self, slab: int) -> None:
        """Forget a slab's records, because its new file has an empty table."""
        self._tables[slab] = np.zeros((), dtype=RECORD)
        self._dirty[slab] = False

    def take_dirty(self) -> list[Pages]:
        """Return copies of all pages to write; they count as written from now on."""
        taken = []
        for slab in np.flatnonzero(self._dirty.any(axis=1)).tolist():
            pages = np.flatnonzero(self._dirty[slab])
            records = aligned(pages.size * RECORDS_PER_PAGE * RECORD.itemsize).view(RECORD)
            records = records.reshape(-1, RECORDS_PER_PAGE)
            records[:] = self._tables[slab].reshape(-1, RECORDS_PER_PAGE)[pages]
            taken.append(Pages(slab, pages, records))
        self._dirty[:] = False
        return taken

    def give_back(self, taken: list[Pages]) -> None:
        """Mark the pages `taken` as unwritten again: their write failed."""
        for one in taken:
            self._dirty[one.slab, one.pages] = True
