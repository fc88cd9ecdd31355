"""The only writer of a store's files: payloads, a sync, records; and a sync for `flush`.

The caller has the writer's turn. The store's lock is held for moments, never over I/O.

Slabs without a file, because the disk is full, are closed: out of use until there is room. A closed
slab serves a block size that fits nowhere, and its first slot is in LIMBO. So it is not spare, and
nobody clears it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from kvray.errors import CapacityError, TierError
from kvray.store.arena import slabs, slots
from kvray.store.arena.layout import FREE, LIMBO, NO_SLOTS, RESERVED, Array, align
from kvray.store.arena.tables import Tables
from kvray.store.nvme.record import RECORD
from kvray.store.nvme.record_table import Pages, RecordTable
from kvray.store.nvme.segment_files import SegmentFiles
from kvray.store.nvme.terms import Demotion
from kvray.store.nvme.transfers import IoThreads, check_same, chunk_bytes, chunks, moves

_log = logging.getLogger("kvray.nvme")

_RETRY_S = 10.0  # how often a full disk is checked for room


class Writer:
    """Writes blocks and records; see `NvmeStore.write` and `NvmeStore.flush`."""

    def __init__(
        self,
        tables: Tables,
        record_table: RecordTable,
        files: SegmentFiles,
        threads: IoThreads,
        section: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        """`section` is the lock of tables and records, held for moments and never over I/O."""
        self.written_bytes = 0
        self._tables, self._record_table, self._files = tables, record_table, files
        self._threads, self._section = threads, section
        self._geometry = tables.geometry
        self._unsynced = set(files.by_slab)
        """Slabs with records that a power loss could take: at first all, by who wrote before."""
        self._look_at = 0.0
        self._failure = ""

    def write(self, demotions: Sequence[Demotion], arena: Tables) -> list[Array]:
        """Write and record blocks; see `NvmeStore.write`."""
        targets = _joined([one.reservation.slots for one in demotions])
        sources = _joined([one.arena_slots for one in demotions])
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon, demotions, targets)
            self._check_trusted()
            check_same(self._tables, targets, arena, sources)
            stored = self._make_files(targets)
            rows = np.flatnonzero(stored)
            self._write_payloads(targets[rows], arena, sources[rows])
            checksums = arena.slot_checksum[sources]
            self._record(demotions, targets, stored, checksums)
            self._write_records()
            on_failure.pop_all()
        masks = _split(stored, demotions)
        self._settle(demotions, masks, _split(checksums, demotions))
        return masks

    def flush(self) -> None:
        """Return when all that is recorded survives a power loss."""
        self._check_trusted()
        self._write_records()
        self._sync(self._unsynced)
        self._unsynced.clear()

    # -- files --------------------------------------------------------------------------------

    def _make_files(self, targets: Array) -> Array:
        """Give the slabs of `targets` their files; return a mask of the slots that have one."""
        if num_closed(self._tables) and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _RETRY_S
            if self._files.has_room_for_one():
                with self._section():
                    reopen(self._tables)
        slab_of = self._geometry.slab_of(targets)
        has_file = np.ones(len(targets), dtype=bool)
        for slab in np.unique(slab_of).tolist():
            block_bytes = int(self._tables.slab_block_bytes[slab])
            if self._files.serves(slab, block_bytes):
                continue
            with self._section():
                self._record_table.forget(slab)
            self._unsynced.discard(slab)
            try:
                self._files.replace(slab, block_bytes)
            except CapacityError as error:
                has_file[slab_of == slab] = False
                self._stop_growing(targets[slab_of == slab], error)
        return has_file

    def _stop_growing(self, homeless: Array, error: CapacityError) -> None:
        """Go on with the existing files until the disk has room for one more."""
        with self._section():
            mine = homeless[self._tables.slot_state[homeless] == RESERVED]
            slots.free(self._tables, mine)
            self._tables.counts.dropped += len(mine)
            closed = close_spare(self._tables, self._files.mask())
        if len(closed):
            _log.warning("%s The NVMe tier goes on with the segments that it has.", error)
        self._look_at = time.monotonic() + _RETRY_S

    # -- blocks -------------------------------------------------------------------------------

    def _write_payloads(self, targets: Array, arena: Tables, sources: Array) -> None:
        # The arena's checksum was made while the bytes were in a cache. It goes into the record as
        # it is. The read that brings the block back compares it before anything is served, and so
        # finds a block that memory or the disk has damaged meanwhile.
        each = moves(self._files.by_slab, targets, self._geometry, arena, sources)
        size = chunk_bytes(each, self._threads.num_threads)
        self._threads.run(
            [
                partial(one.segment.file.write, chunk.buffers, chunk.offset)
                for one in each
                for chunk in chunks(one, size)
            ]
        )
        self._sync(np.unique(self._geometry.slab_of(targets)).tolist())
        self.written_bytes += sum(
            len(one.rows) * align(one.segment.shape.block_bytes) for one in each
        )

    def _record(
        self, demotions: Sequence[Demotion], targets: Array, stored: Array, checksums: Array
    ) -> None:
        records = np.zeros(len(targets), dtype=RECORD)
        tables = self._tables
        records["key"] = tables.slot_key[targets]
        if demotions:
            records["parent"] = np.vstack([one.parents for one in demotions])
        records["part"] = tables.slot_part[targets]
        records["depth"] = tables.slot_depth[targets]
        records["length"] = tables.block_bytes(targets)
        records["payload_checksum"] = checksums
        records["sequence"] = tables.slot_number[targets]
        records["used"] = tables.slot_tick[targets]
        records["namespace"] = tables.slot_namespace[targets]
        records["priority"] = tables.slot_priority[targets]
        records["head"] = tables.slot_head[targets].view("u1").reshape(-1, 4)[:, :3]
        with self._section():
            self._record_table.put(targets[stored], records[stored])

    def _settle(
        self, demotions: Sequence[Demotion], masks: list[Array], checksums: list[Array]
    ) -> None:
        with self._section():
            for demotion, mask, sums in zip(demotions, masks, checksums, strict=True):
                whole = demotion.reservation
                slots.commit(self._tables, whole.only(mask), sums[mask])
                slots.abort(self._tables, whole.only(~mask))

    def _abandon(self, demotions: Sequence[Demotion], targets: Array) -> None:
        with self._section():
            self._record_table.bury(targets)
            for one in demotions:
                slots.abort(self._tables, one.reservation)

    # -- records ------------------------------------------------------------------------------

    def _write_records(self) -> None:
        with self._section():
            taken = self._record_table.take_dirty()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._take_back, taken)
            self._unsynced.update(one.slab for one in taken)
            by_slab = self._files.by_slab
            self._threads.run(
                [partial(by_slab[one.slab].write_pages, one.pages, one.records) for one in taken]
            )
            on_failure.pop_all()

    def _take_back(self, taken: list[Pages]) -> None:
        with self._section():
            self._record_table.give_back(taken)

    def _sync(self, numbers: Iterable[int]) -> None:
        try:
            self._threads.run([self._files.by_slab[slab].file.sync for slab in numbers])
        except (CapacityError, TierError) as error:
            self._failure = str(error)
            raise

    def _check_trusted(self) -> None:
        # After a sync that failed the kernel holds for written what is not: the next would succeed.
        if self._failure:
            raise TierError(
                f"{self._failure} Since then nothing is written to the NVMe tier; restart it when"
                " the device is well."
            )


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([NO_SLOTS, *arrays])


def _split(values: Array, demotions: Sequence[Demotion]) -> list[Array]:
    ends = np.cumsum([len(one.arena_slots) for one in demotions])
    return np.split(values, ends[:-1]) if len(ends) else []


CLOSED = 2**62  # stands for the block size of a closed slab


def close_spare(tables: Tables, has_file: Array) -> Array:
    """Close the spare slabs without a file, and return them; `has_file` masks all slabs."""
    closed = np.flatnonzero((tables.slab_block_bytes == 0) & ~has_file)
    slabs.serve(tables, closed, CLOSED)
    tables.put(tables.geometry.slots_at(closed, 0), slot_state=LIMBO)
    return closed


def reopen(tables: Tables) -> None:
    """Make every closed slab spare again."""
    closed = np.flatnonzero(tables.slab_block_bytes == CLOSED)
    tables.put(tables.geometry.slots_at(closed, 0), slot_state=FREE)
    slabs.serve(tables, closed, 0)


def num_closed(tables: Tables) -> int:
    """Return how many slabs wait for room on the disk."""
    return int(np.count_nonzero(tables.slab_block_bytes == CLOSED))
