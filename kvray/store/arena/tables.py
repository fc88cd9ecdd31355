"""The tables of an arena as numpy views on its mapping.

The undo record has the old values of all that the present section overwrites. A section changes the
tables in steps. Before a step overwrites anything that counts, it notes the old values here, in the
file itself. The next taker of the lock after a death puts them back. So a step happens whole or not
at all, and undoing it costs as much as doing it.

Why that holds, wherever the writer dies: an entry is complete before the count of entries covers
it, and covered before the first of its rows is overwritten. To put values back half, and then
again, is the same as once. A death ends a process between two instructions, and the next taker of
the lock sees every store before that point.

Values that nobody reads now are not noted: the rows of a FREE slot or page, recency, and counters
that only grow. So a slot that a step frees must not be filled before the step is settled.

A ring of the tables has what happened to blocks, for those who follow it. Whoever makes a slot
READY, ends that, or leases it as a use, notes its number there, in the same step. So a look costs
what has happened since the last one, and not what the arena has. A reader that was overtaken looks
at all slots again, a piece at a time, as at first. Why nothing is missed: a step notes before it
ends, and a reader reads under the lock. So what a reader sees of the tables is no older than the
notes behind which it goes on. The note of a step that was undone costs a look in vain.
"""

import ctypes
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.ma  # which np.unique would import within a request: 40 to 150 ms

from kvray.store.arena.layout import (
    HEADER,
    NO_SLOTS,
    SIZE_FACTOR,
    UNDO_ENTRIES,
    Array,
    Columns,
    Geometry,
    header_offset,
)

TORN = 2**32
"""In place of the count: the step was too large to note. After a death in it only a rebuild helps.
"""

_WORD = 4


class UndoRecord:
    """The undo record, as one process writes it; its user holds the arena's lock."""

    def __init__(
        self, columns: Mapping[str, Array], counts: "Counts", entries: Array, log: Array
    ) -> None:
        """Note what is overwritten in `columns`, one-dimensional and the same in every process.

        One of `counts` is that of entries. A row of `entries` is
        (column, rows, where its index starts in the log, where its values). `log` has u32 words.
        """
        self._columns = list(columns.values())
        self._codes = {name: code for code, name in enumerate(columns)}
        self._counts = counts
        self._entries = entries
        self._log = log
        self._count = 0
        self._used = 0

    @property
    def is_open(self) -> bool:
        """Whether this section, or one that died, has begun a step and not settled it."""
        return bool(self._counts.undo_count)

    def begin(self) -> bool:
        """Begin a section; return whether another section has left its step open."""
        # An exception may have come before this process could note that somebody undid its step.
        self._count = self._used = 0
        return bool(self._counts.undo_count)

    def note(self, index: Array, names: Collection[str]) -> None:
        """Note the rows `index`, counted from the table's start, of the columns `names`."""
        rows, start = len(index), self._used
        if not rows or self._count == TORN:
            return
        num_words = rows + len(names) * (2 * rows + 1)
        has_entries = self._count + len(names) <= len(self._entries)
        if not has_entries or start + num_words > len(self._log):
            self.tear()
            return
        at = start + rows
        self._log[start:at] = index
        for name in names:
            code = self._codes[name]
            column = self._columns[code]
            at += at % 2  # columns of eight bytes a row are read and written aligned
            end = at + -(-rows * column.itemsize // _WORD)
            values = self._log[at:end].view(column.dtype)[:rows]
            column.take(index, out=values, mode="clip")  # the mode that writes to `out` directly
            self._entries[self._count] = code, rows, start, at
            self._count += 1
            at = end
        self._used = at
        self._counts.undo_count = self._count

    def tear(self) -> None:
        """Stop noting in this step: after a death in it only a rebuild helps."""
        self._counts.undo_count = self._count = TORN

    def settle(self) -> None:
        """Make all that was written since the last settlement final."""
        if self._count:
            self._counts.undo_count = self._count = self._used = 0

    def roll_back(self) -> bool:
        """Undo the open step, whoever began it; False if it is torn or makes no sense."""
        count = self._counts.undo_count
        self._count = self._used = 0  # this process has noted nothing of the next step
        if count > UNDO_ENTRIES:
            return False
        entries = self._entries[:count].tolist()
        if not all(self._is_valid(*entry) for entry in entries):
            self._counts.undo_count = TORN
            return False
        for code, rows, start, at in reversed(entries):
            column = self._columns[code]
            end = at + -(-rows * column.itemsize // _WORD)
            before = self._log[at:end].view(column.dtype)[:rows]
            column[self._log[start : start + rows]] = before
        self._counts.undo_count = 0
        return True

    def _is_valid(self, code: int, rows: int, start: int, at: int) -> bool:
        """Whether an entry can have been written by `note`."""
        if code >= len(self._columns) or start + rows > at or at + 2 * rows > len(self._log):
            return False
        return bool((self._log[start : start + rows] < len(self._columns[code])).all())


__all__ = ["Array", "Tables"]

_SIZE_OF_CHECK = np.uint64(pow(SIZE_FACTOR, -1, 2**64))

_UNDONE = (
    "slab_block_bytes",
    "slab_free",
    "slot_state",
    "slot_parent",
    "slot_children",
    "slot_leases",
    "index_slot",
    "index_tag",
    "holder_live",
    "page_holder",
    "slab_check",
)
"""Columns of the undo record: they say what is what. The others change nothing of that."""

_STATE = header_offset("state")
_WAITING = header_offset("waiting")


class Counts(ctypes.Structure):
    """The header's counts, in place: the cheapest way from Python to a shared u64."""

    _fields_ = tuple(
        (name, ctypes.c_uint64 if HEADER[name] == "<u8" else ctypes.c_ubyte * HEADER[name].itemsize)
        for name in HEADER.names or ()
    )


class Tables(Columns):
    """The columns, and the header.

    Views on a buffer that may be shared with other processes. All functions that take a `Tables`
    expect the caller to hold the arena's lock, unless they say otherwise. Values that follow from
    no others are written by `put` and `add` only, which can be undone.
    """

    def __init__(self, buffer: Any, geometry: Geometry, *, has_data: bool = True) -> None:
        """Lay views over `buffer`, of `geometry.file_bytes` bytes, or `table_bytes` without data.

        Without `has_data` the slots' bytes lie elsewhere, as in files, and `data` is empty.
        """
        self.geometry = geometry
        self.bucket_mask = np.uint64(geometry.num_buckets - 1)
        self.header: Array = np.ndarray((), HEADER, buffer)
        self.counts: Any = Counts.from_buffer(buffer)
        self.state = memoryview(buffer)[_STATE : _STATE + 4].cast("I")
        """LIVE or RETIRED, one item; may be read without the lock, and is never undone."""
        self.waiting = memoryview(buffer)[_WAITING : _WAITING + 8].cast("Q")
        offsets = geometry.offsets()
        for name, dtype, shape in geometry.tables():
            setattr(self, name, np.ndarray(shape, dtype, buffer, offsets[name]))
        data_bytes, at = (geometry.capacity, offsets["data"]) if has_data else (0, 0)
        self.data: Array = np.ndarray((data_bytes,), "u1", buffer, at)
        self.columns = {name: getattr(self, name).reshape(-1) for name in _UNDONE}
        self.undo = UndoRecord(self.columns, self.counts, self.undo_entry, self.undo_log)

    def put(self, index: Array, **values: Any) -> None:
        """Write the rows `index`, each at most once in it, of the columns that `values` names."""
        self.undo.note(index, values)
        for name, value in values.items():
            self.columns[name][index] = value

    def add(self, index: Array, **amounts: Any) -> None:
        """Add to the rows `index` of the columns that `amounts` names, as often as they occur."""
        self.undo.note(index, amounts)
        for name, amount in amounts.items():
            column = self.columns[name]
            # Of the column's own type it costs a thirtieth.
            np.add.at(column, index, np.asarray(amount, dtype=column.dtype))

    def next_tick(self) -> int:
        """Advance and return the arena's logical time, the measure of recency."""
        tick: int = self.counts.tick + 1
        self.counts.tick = tick
        return tick

    def changed(self, slots: Array) -> None:
        """Note that `slots` became or ceased to be READY, for those who announce it."""
        self.note_event(slots)
        self.counts.changes += 1

    def note_event(self, slots: Array) -> None:
        """Note that the blocks in `slots` came, went or were used: see the module."""
        count, rows = len(slots), len(self.event_slot)
        start = self.counts.events % rows
        if start + count <= rows:
            self.event_slot[start : start + count] = slots
        else:  # of more than the ring has, readers know by the count that some are lost
            last = slots[-rows:]
            self.event_slot[(start + count - len(last) + np.arange(len(last))) % rows] = last
        self.counts.events += count

    @property
    def num_backed(self) -> int:
        """How many slot rows have memory: whole runs of every slab. No block is in any other."""
        missing: int = self.counts.missing_rows
        if not missing:
            return self.geometry.num_slots
        first = self.geometry.run_slots * self.geometry.num_slabs
        return max(first, (self.geometry.num_slots - missing) // first * first)

    @property
    def backed(self) -> slice:
        """The slot rows that have memory."""
        return slice(0, self.num_backed)

    def slots_in(self, *states: int) -> Array:
        """Return the slots that are in one of these states, ascending."""
        held = self.slot_state[self.backed]
        mask = held == states[0]
        for state in states[1:]:
            mask |= held == state
        return np.flatnonzero(mask)

    def parents(self, slots: "Array | slice") -> Array:
        """Return the slot of the block before each of `slots`, i4; -1 where there is none."""
        parents = self.slot_parent[slots]
        # A damaged table may name a slot that does not exist.
        found: Array = np.where(parents.view("<u4") < self.num_backed, parents, -1)
        return found

    def sizes_of(self, slabs: "Array | slice") -> Array:
        """Return the block size that each of `slabs` serves, u8; a flipped bit does not change it.

        Of a slab that has blocks: the second copy is 0 in a spare one.
        """
        copied: Array = self.slab_check[slabs] * _SIZE_OF_CHECK
        is_size = (copied > 0) & (copied <= self.geometry.slab_bytes)
        return np.where(is_size, copied, self.slab_block_bytes[slabs])

    def serve(self, slabs: Array, block_bytes: int) -> Array:
        """Return a mask of those of `slabs`, which have blocks, that serve a block size."""
        serve: Array = self.slab_block_bytes.take(slabs) == block_bytes
        return serve if serve.all() else self.sizes_of(slabs) == block_bytes

    def size_of(self, slab: int) -> int:
        """Return the block size that one slab with blocks serves, as `sizes_of` does."""
        copied = int(self.slab_check[slab]) * int(_SIZE_OF_CHECK) & 2**64 - 1
        is_size = 0 < copied <= self.geometry.slab_bytes
        return copied if is_size else int(self.slab_block_bytes[slab])

    def block_bytes(self, slots: Array) -> Array:
        """Return the bytes of the block in each of `slots`, i8."""
        return self.sizes_of(self.geometry.slab_of(slots)).astype(np.int64)

    def name(self, slot: int) -> str:
        """Return a slot's key as people see it: its first 8 hex digits."""
        return bytes(self.slot_key[slot].tobytes()).hex()[:8]


_PIECE = 32_768
"""Slots that one look goes through of those that it has to look at without a note."""


class EventReader:
    """One reader's place in the ring; at first all slots are to be looked at."""

    def __init__(self) -> None:
        self._read = -1
        """Count of events before which it has read everything; -1: nothing."""
        self._scan_at = 0
        """The first slot that it has not looked at since it was overtaken."""

    def has_more(self, tables: Tables) -> bool:
        """Return whether anything is to be looked at; needs no lock."""
        return self._read != tables.counts.events or self.is_behind(tables)

    def is_behind(self, tables: Tables) -> bool:
        """Return whether there are slots that it has not looked at since it was overtaken."""
        return self._scan_at < tables.num_backed

    def take(self, tables: Tables) -> Array:
        """Return slots to look at next, ascending, each once; the lock is held."""
        events, num_slots, rows = tables.counts.events, tables.num_backed, len(tables.event_slot)
        noted = NO_SLOTS
        if self._read >= 0 and 0 <= events - self._read <= rows:
            at = np.arange(self._read, events) % rows
            noted = np.unique(tables.event_slot.take(at)).astype(np.int64)
            noted = noted[: np.searchsorted(noted, num_slots)]  # a damaged table may name others
        else:
            self._scan_at = 0
        self._read = events
        start, self._scan_at = self._scan_at, min(self._scan_at + _PIECE, num_slots)
        piece = np.arange(start, self._scan_at)
        if not len(piece):
            return noted
        return np.union1d(noted, piece) if len(noted) else piece
