"""The tables of an arena as numpy views on its mapping."""

from typing import Any

import numpy as np
import numpy.ma  # which np.unique would import within a request: 40 to 150 ms

from kvray.store.arena.layout import HEADER, SIZE_FACTOR, Array, Columns, Geometry, header_offset
from kvray.store.arena.undo import UndoRecord

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


def _word(field: str) -> Any:
    """Return a property for a u64 of the header, five times faster than the header's own."""
    at = header_offset(field) // 8

    def read(self: "Tables") -> int:
        return self._words[at]

    def write(self: "Tables", value: int) -> None:
        self._words[at] = value

    return property(read, write)


class Tables(Columns):
    """The columns, and the header.

    Views on a buffer that may be shared with other processes. All functions that take a `Tables`
    expect the caller to hold the arena's lock, unless they say otherwise. Values that follow from
    no others are written by `put` and `add` only, which can be undone.
    """

    shard_epoch = _word("shard_epoch")
    tick = _word("tick")
    changes = _word("changes")
    next_lease = _word("next_lease")
    next_page = _word("next_page")
    stored = _word("stored")
    evicted = _word("evicted")
    dropped = _word("dropped")
    corrupt = _word("corrupt")
    repairs = _word("repairs")
    over_quota = _word("over_quota")
    events = _word("events")
    missing_rows = _word("missing_rows")
    wanted_rows = _word("wanted_rows")

    def __init__(
        self,
        buffer: Any,
        geometry: Geometry,
        *,
        has_data: bool = True,
        has_undo: bool = True,
    ) -> None:
        """Lay views over `buffer`, of `geometry.file_bytes` bytes, or `table_bytes` without data.

        Without `has_data` the slots' bytes lie elsewhere, as in files, and `data` is empty. Without
        `has_undo` a step cannot be undone: for tables that end with their process.
        """
        self.geometry = geometry
        self.bucket_mask = np.uint64(geometry.num_buckets - 1)
        self.header: Array = np.ndarray((), HEADER, buffer)
        self._words = memoryview(buffer)[: HEADER.itemsize].cast("Q")
        self._state = memoryview(buffer)[_STATE : _STATE + 4].cast("I")
        self.waiting = memoryview(buffer)[_WAITING : _WAITING + 8].cast("Q")
        offsets = geometry.offsets()
        for name, dtype, shape in geometry.tables():
            setattr(self, name, np.ndarray(shape, dtype, buffer, offsets[name]))
        data_bytes, at = (geometry.capacity, offsets["data"]) if has_data else (0, 0)
        self.data: Array = np.ndarray((data_bytes,), "u1", buffer, at)
        self.columns = {name: getattr(self, name).reshape(-1) for name in _UNDONE}
        entries = self.undo_entry if has_undo else self.undo_entry[:0]
        self.undo = UndoRecord(self.columns, self._words, entries, self.undo_log)

    @property
    def state(self) -> int:
        """LIVE or RETIRED; may be read without the lock, and is never undone."""
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state

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
        tick: int = self.tick + 1
        self.tick = tick
        return tick

    def changed(self, slots: Array) -> None:
        """Note that `slots` became or ceased to be READY, for those who announce it."""
        self.note_event(slots)
        self.changes += 1

    def note_event(self, slots: Array) -> None:
        """Note that the blocks in `slots` came, went or were used: see `events`."""
        count, rows = len(slots), len(self.event_slot)
        start = self.events % rows
        if start + count <= rows:
            self.event_slot[start : start + count] = slots
        else:  # of more than the ring has, readers know by the count that some are lost
            last = slots[-rows:]
            self.event_slot[(start + count - len(last) + np.arange(len(last))) % rows] = last
        self.events += count

    @property
    def num_backed(self) -> int:
        """How many slot rows have memory: whole runs of every slab. No block is in any other."""
        missing: int = self.missing_rows
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
        return int(self.sizes_of(slice(slab, slab + 1))[0])

    def block_bytes(self, slots: Array) -> Array:
        """Return the bytes of the block in each of `slots`, i8."""
        return self.sizes_of(self.geometry.slab_of(slots)).astype(np.int64)

    def name(self, slot: int) -> str:
        """Return a slot's key as people see it: its first 8 hex digits."""
        return bytes(self.slot_key[slot].tobytes()).hex()[:8]

    def rows(self, slab: int) -> Array:
        """Return a slab's slots as bytes, shape [slots, stride]."""
        geometry = self.geometry
        stride = geometry.stride(self.size_of(slab))
        count = geometry.slab_bytes // stride
        start = slab * geometry.slab_bytes
        return self.data[start : start + count * stride].reshape(count, stride)
