"""Reads blocks of a store into an arena, and checks each of them.

Any number of reads may run at once. Each leases its blocks, so that nobody writes there. The
store's lock is held for moments, never over I/O.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

import numpy as np

from kvray.errors import ShardUnavailable
from kvray.store.arena import key_index, slots
from kvray.store.arena.layout import READY, Array
from kvray.store.arena.tables import Tables
from kvray.store.nvme.book import StoreParts
from kvray.store.nvme.terms import Promoted
from kvray.store.nvme.transfers import check_same, chunk_bytes, moves, read_tasks

_log = logging.getLogger("kvray.nvme")


class Reader:
    """Reads blocks, and notes when; see `NvmeStore.read`."""

    def __init__(self, parts: StoreParts) -> None:
        self.num_unreadable = self.read_bytes = 0
        self._tables, self._book, self._files, self._threads, self._section = parts
        self._idle = threading.Condition()
        self._num_reading = 0
        self._is_closed = False

    def close(self) -> None:
        """Begin no further reads; return when none is under way."""
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._num_reading)

    def read(self, keys: Array, part: int, arena: Tables, arena_slots: Array) -> Promoted:
        """Read blocks and check them; see `NvmeStore.read`."""
        sound = np.zeros(len(keys), dtype=bool)
        checksums = np.zeros(len(keys), dtype="<u8")
        with self._under_way(), self.leased(keys, part) as found:
            rows = np.flatnonzero(found >= 0)
            held, into = found[rows], arena_slots[rows]
            check_same(self._tables, held, arena, into)
            sums = np.zeros(len(rows), dtype="<u8")
            unreadable = np.zeros(len(rows), dtype=bool)
            each = moves(self._files.by_slab, held, self._tables.geometry, arena, into)
            size = chunk_bytes(each, self._threads.num_threads)
            self._threads.run(
                [
                    task
                    for one in each
                    for task in read_tasks(one, chunk_bytes=size, sums=sums, unreadable=unreadable)
                ]
            )
            same = (sums == self._tables.slot_checksum[held]) & ~unreadable
            self._note(held, same, unreadable)
        checksums[rows], sound[rows] = sums, same
        return Promoted(sound=sound, checksums=checksums)

    @contextlib.contextmanager
    def leased(self, keys: Array, part: int) -> Iterator[Array]:
        """Lease the blocks that are here; yields the slot of each key, -1 where there is none."""
        with self._section():
            found = key_index.find(self._tables, keys, part)
            found[self._tables.slot_state[found] != READY] = -1
            held = found[found >= 0]
            self._tables.add(held, slot_leases=1)
        try:
            yield found
        finally:
            with self._section():
                self._tables.add(held, slot_leases=-1)

    def note_use(self) -> None:
        """Write into the book when blocks were used."""
        with self._section():
            ready = np.flatnonzero(self._tables.slot_state == READY)
            records = self._book.records(ready)
            used = self._tables.slot_tick[ready]
            changed = records["used"] != used
            records["used"] = used
            self._book.put(ready[changed], records[changed])

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._idle:
            if self._is_closed:
                raise ShardUnavailable("This process has closed its NVMe tier.")
            self._num_reading += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    def _note(self, held: Array, same: Array, unreadable: Array) -> None:
        tables = self._tables
        bad, good = held[~same & ~unreadable], held[same]
        with self._section():
            slots.quarantine(tables, bad)
            # The bytes that its record promises are lost, after a restart too.
            self._book.bury(bad)
            tables.slot_tick[good] = tables.next_tick()
            self.num_unreadable += int(np.count_nonzero(unreadable))
            self.read_bytes += int(tables.block_bytes(good).sum())
        if len(bad):
            _log.error(
                "%d blocks of the NVMe tier do not have their checksum, the first of key %s; they"
                " are out of service",
                len(bad),
                tables.name(bad[0]),
            )
        if unreadable.any():
            _log.error(
                "The device of the NVMe tier refused to read %d blocks; look at it with `dmesg`",
                np.count_nonzero(unreadable),
            )
