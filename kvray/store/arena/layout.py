"""Where everything lies in an arena file: a header, tables of fixed size, then the data."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import numpy as np
import numpy.typing as npt
import xxhash

from kvray.identity.block import KEY_BYTES

Array = npt.NDArray[Any]

NO_SLOTS: Array = np.empty(0, dtype=np.int64)

MAGIC = b"KVRAYARN"
FORMAT_VERSION = 8
ALIGNMENT = 4096
"""Slots start and end on this boundary, so that files can be read into them directly."""

LIVE, RETIRED = 1, 2
"""States of an arena. RETIRED: who maps it detaches and looks for its successor."""

FREE, RESERVED, READY, LIMBO, QUARANTINED = range(5)
"""States of a slot. Only READY slots are ever read as blocks. LIMBO: its writer died, and a late
copy may still land. QUARANTINED: its bytes did not have their checksum."""

PRIORITY_MAX = 100
DEFAULT_PRIORITY = 35
"""Priority of blocks without one: TensorRT-LLM's `kDefaultRetentionPriority`."""

BUCKET_WAYS = 16
PAGE_SLOTS = 256
PAGES_MAX = 65_536
RUN_SLOTS = 64
"""Slots of one slab that are neighbours in the tables: see `Geometry.slots_at`."""
FIRST_ROWS = 2**20
"""Slot rows that have memory from the start, some 100 MiB; all rows of an arena that has fewer."""
LABEL_BYTES = 64
SIZE_FACTOR = 0x9E3779B97F4A7C15
"""Of a block size, for its second copy in `slab_check`, modulo 2^64. A flipped bit of the copy
makes it stand for a size of more than 2^58 bytes: so one can tell which of the two is right."""
QUOTAS_MAX = 64
QUEUES = 8
"""Block sizes that have a queue of victims; more sizes share them."""
UNDO_ENTRIES = 1024
UNDO_WORDS_PER_SLOT = 16
UNDO_SLOTS_MAX = 65_536
"""Slots that one step may change and still be undone; the largest are far smaller."""

HEADER = np.dtype(
    [
        # The first four have their places in every version of the format.
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("state", "<u4"),
        ("arena_id", "S16"),
        ("cluster_name", "S64"),
        ("created", "<f8"),
        ("capacity", "<u8"),
        ("slab_bytes", "<u8"),
        ("slot_min", "<u8"),
        ("holders_max", "<u8"),
        # Of all fields before it but `state`. Those after it change.
        ("checksum", "<u8"),
        ("shard_epoch", "<u8"),
        # Not 0 for as long as somebody changes the tables: see `undo`.
        ("undo_count", "<u8"),
        ("tick", "<u8"),
        ("changes", "<u8"),
        ("next_lease", "<u8"),
        ("next_page", "<u8"),
        ("stored", "<u8"),
        ("evicted", "<u8"),
        ("dropped", "<u8"),
        ("corrupt", "<u8"),
        ("repairs", "<u8"),
        ("over_quota", "<u8"),
        ("events", "<u8"),
        ("missing_rows", "<u8"),
        ("wanted_rows", "<u8"),
        # Written by those who wait for the lock, see `lock.ArenaLock`.
        ("waiting", "<u8"),
    ]
)

_NAMES = HEADER.names or ()
_FIXED = [name for name in _NAMES[: _NAMES.index("checksum")] if name != "state"]


def header_offset(field: str) -> int:
    """Return where `field` starts in the header."""
    fields = HEADER.fields
    assert fields is not None
    return fields[field][1]


def header_checksum(header: bytes) -> int:
    """Return the xxh3 of the fields that never change in an arena's life."""
    fields = np.frombuffer(header, HEADER, count=1)
    return xxhash.xxh3_64_intdigest(b"".join(fields[name].tobytes() for name in _FIXED))


def align(size: int, to: int = ALIGNMENT) -> int:
    """Return `size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


_Index = TypeVar("_Index", int, Array)
"""A number, or an array of them."""


class Columns:
    """The tables of an arena in file order: element type, and shape in figures of `Geometry`."""

    slab_block_bytes: Annotated[Array, "<u8", "num_slabs"]
    slab_check: Annotated[Array, "<u8", "num_slabs"]
    slab_free: Annotated[Array, "<i4", "num_slabs"]
    slot_state: Annotated[Array, "u1", "num_slots"]
    slot_key: Annotated[Array, "<u8", "num_slots", KEY_BYTES // 8]
    slot_part: Annotated[Array, "<u4", "num_slots"]
    slot_depth: Annotated[Array, "<u4", "num_slots"]
    slot_parent: Annotated[Array, "<i4", "num_slots"]
    slot_children: Annotated[Array, "<i4", "num_slots"]
    slot_leases: Annotated[Array, "<i4", "num_slots"]
    slot_holder: Annotated[Array, "<i4", "num_slots"]
    slot_number: Annotated[Array, "<u8", "num_slots"]
    slot_tick: Annotated[Array, "<u8", "num_slots"]
    slot_checksum: Annotated[Array, "<u8", "num_slots"]
    slot_since: Annotated[Array, "<f8", "num_slots"]
    slot_namespace: Annotated[Array, "<u4", "num_slots"]
    slot_priority: Annotated[Array, "u1", "num_slots"]
    slot_head: Annotated[Array, "<u4", "num_slots"]
    index_slot: Annotated[Array, "<u4", "num_buckets", BUCKET_WAYS]
    index_tag: Annotated[Array, "<u4", "num_buckets", BUCKET_WAYS]
    holder_live: Annotated[Array, "<u4", "holders_max"]
    holder_generation: Annotated[Array, "<u4", "holders_max"]
    holder_pid: Annotated[Array, "<u4", "holders_max"]
    holder_since: Annotated[Array, "<f8", "holders_max"]
    holder_label: Annotated[Array, f"S{LABEL_BYTES}", "holders_max"]
    page_holder: Annotated[Array, "<i4", "num_pages"]
    page_lease: Annotated[Array, "<u8", "num_pages"]
    page_next: Annotated[Array, "<i4", "num_pages"]
    page_count: Annotated[Array, "<u4", "num_pages"]
    page_since: Annotated[Array, "<f8", "num_pages"]
    page_slots: Annotated[Array, "<u4", "num_pages", PAGE_SLOTS]
    quota_namespace: Annotated[Array, "<u4", QUOTAS_MAX]
    quota_mask: Annotated[Array, "<u4", QUOTAS_MAX]
    quota_bytes: Annotated[Array, "<u8", QUOTAS_MAX]
    queue_bytes: Annotated[Array, "<u8", QUEUES]
    queue_tick: Annotated[Array, "<u8", QUEUES]
    queue_next: Annotated[Array, "<u4", QUEUES]
    queue_end: Annotated[Array, "<u4", QUEUES]
    queue_slot: Annotated[Array, "<u4", "queue_rows"]
    queue_slab_next: Annotated[Array, "<u4", 1]
    queue_slab_end: Annotated[Array, "<u4", 1]
    queue_slab: Annotated[Array, "<u4", "num_slabs"]
    event_slot: Annotated[Array, "<u4", "event_rows"]
    undo_entry: Annotated[Array, "<u4", UNDO_ENTRIES, 4]
    undo_log: Annotated[Array, "<u4", "undo_words"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Figures that never change in an arena's life; every offset follows from them.

    What every request asks for is derived once.
    """

    capacity: int
    slab_bytes: int
    slot_min: int
    holders_max: int

    @property
    def is_valid(self) -> bool:
        """Whether the figures can be an arena's: all positive, each a multiple."""
        return (
            min(self.capacity, self.slab_bytes, self.slot_min, self.holders_max) > 0
            and self.capacity % self.slab_bytes == 0
            and self.slab_bytes % self.slot_min == 0
            and self.slot_min % ALIGNMENT == 0
        )

    @cached_property
    def num_slabs(self) -> int:
        """Slabs in the arena."""
        return self.capacity // self.slab_bytes

    @cached_property
    def slots_per_slab(self) -> int:
        """Rows of the slot table that a slab owns; a large block size uses the first few."""
        return self.slab_bytes // self.slot_min

    @cached_property
    def run_slots(self) -> int:
        """Rows of one slab that are neighbours."""
        return math.gcd(self.slots_per_slab, RUN_SLOTS)

    @cached_property
    def num_slots(self) -> int:
        """Rows of the slot table."""
        return self.num_slabs * self.slots_per_slab

    @property
    def num_buckets(self) -> int:
        """Buckets of the key index, a power of two.

        At four slots a bucket of 16 ways, one bucket in a million overflows (Poisson). A block that
        finds its bucket full is not stored.
        """
        return max(16, 1 << (self.num_slots // 4 - 1).bit_length())

    @property
    def num_pages(self) -> int:
        """Pages for lease records: as many requests as there are can be promised at once."""
        return min(max(64, self.num_slots // 16), PAGES_MAX)

    @property
    def queue_rows(self) -> int:
        """Rows of all queues of victims: each has room for a sixteenth of the slots."""
        return max(16 * QUEUES, self.num_slots // 2)

    @property
    def event_rows(self) -> int:
        """Rows of the ring of slots whose blocks came, went or were used: see `tables`."""
        return max(4096, self.num_slots // 4)

    def stride(self, block_bytes: int) -> int:
        """Return the bytes from one slot of `block_bytes` to the next."""
        return -(-max(block_bytes, self.slot_min) // ALIGNMENT) * ALIGNMENT

    @property
    def undo_words(self) -> int:
        """Words of the undo record's log."""
        return UNDO_WORDS_PER_SLOT * min(self.num_slots, UNDO_SLOTS_MAX) + 4096

    # The first run of every slab comes first, then the second of every slab, and so on. So large
    # blocks, which use few slots of a slab, fill the first rows, and the others need no memory.

    def slots_at(self, slab: Array | int, position: Array | int) -> Array:
        """Return the slots at these positions, counted from 0, of these slabs."""
        at = position & self.run_slots - 1  # a power of two; divmod takes three times as long
        slots = (position // self.run_slots * self.num_slabs + slab) * self.run_slots + at
        return cast("Array", slots)

    def slots_from(self, slab: int, position: int, count: int) -> Array:
        """Return `count` slots of a slab from a position on."""
        run, at = divmod(position, self.run_slots)
        if at + count > self.run_slots:
            return self.slots_at(slab, np.arange(position, position + count))
        first = (run * self.num_slabs + slab) * self.run_slots + at
        return np.arange(first, first + count)

    def slab_of(self, slots: _Index) -> _Index:
        """Return the slab of each of `slots`."""
        return slots // self.run_slots % self.num_slabs

    def place_of(self, slots: _Index) -> tuple[_Index, _Index]:
        """Return (slab, position in it) of each of `slots`."""
        run, at = slots // self.run_slots, slots & self.run_slots - 1
        run, slab = divmod(run, self.num_slabs)
        return slab, run * self.run_slots + at

    def by_slab(self, column: Array) -> Array:
        """Return a view of whole runs of rows as [num_slabs, runs, run_slots]."""
        runs: Array = column.reshape(-1, self.num_slabs, self.run_slots).swapaxes(0, 1)
        return runs

    def rows_for(self, slots_in_slab: int) -> int:
        """Return how many rows have memory if the first `slots_in_slab` of every slab have."""
        return align(min(slots_in_slab, self.slots_per_slab), self.run_slots) * self.num_slabs

    @property
    def first_rows(self) -> int:
        """Rows that have memory from the start, in whole runs of every slab."""
        return self.rows_for(max(1, FIRST_ROWS // self.num_slabs))

    def tables(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (name, dtype, shape) of every table, in file order."""
        found = []
        for name, column in get_type_hints(Columns, include_extras=True).items():
            dtype, *shape = column.__metadata__
            sizes = (getattr(self, one) if isinstance(one, str) else one for one in shape)
            found.append((name, dtype, tuple(sizes)))
        return found

    def offsets(self) -> dict[str, int]:
        """Return the byte offset of every table, and of `data`, each on a page of its own."""
        offsets, at = {}, ALIGNMENT
        for name, dtype, shape in self.tables():
            offsets[name] = at
            at = align(at + np.dtype(dtype).itemsize * math.prod(shape))
        offsets["data"] = align(at, 2 * 2**20)
        return offsets

    def spans(self, rows: range) -> list[tuple[int, int]]:
        """Return where the bytes of these slot rows lie in the file, as (start, stop)."""
        offsets, found = self.offsets(), []
        for name, dtype, shape in self.tables():
            if name.startswith("slot_"):
                row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
                at = offsets[name]
                found.append((at + rows.start * row_bytes, at + rows.stop * row_bytes))
        return found

    @property
    def table_bytes(self) -> int:
        """Size of all that comes before the data."""
        return self.offsets()["data"]

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.table_bytes + self.capacity
