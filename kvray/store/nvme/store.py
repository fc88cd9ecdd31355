"""A node's NVMe tier: blocks in segment files, and an index that every start rebuilds from them.

The arena's code decides here too: the tables are an arena's (`tables`, `slots`, `slabs`,
`key_index`, `eviction`) without its data, in this process's own memory. A slab is a segment file.
Invariants:

- A record is written only when its payload survives a power loss, and a block is READY only when
  its record is written. Blocks that were READY when `flush` began survive a power loss when it
  returns.
- A slot is leased while it is read: nobody evicts or writes it meanwhile.
- A record may outlive its block until its page is written again, at the latest by `flush`. After a
  death it names an evicted block, whose bytes are still there or fail their checksum.
"""

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvray.errors import CapacityError, ConfigError, ShardUnavailable, TierError
from kvray.store.arena import key_index, lease, slots
from kvray.store.arena.eviction import keep_evictable
from kvray.store.arena.layout import READY, Array
from kvray.store.arena.tables import Tables
from kvray.store.machine.access import Access
from kvray.store.machine.side_file import OWNER_BYTE, SideFile
from kvray.store.nvme import recovery
from kvray.store.nvme.disk import Disk, aligned, device_errors, private
from kvray.store.nvme.record import PAGE_BYTES
from kvray.store.nvme.record_table import RecordTable
from kvray.store.nvme.segment_files import SegmentFiles
from kvray.store.nvme.terms import Demotion, NvmeSpec, NvmeStats
from kvray.store.nvme.transfers import IoThreads, check_same, chunk_bytes, moves, read_tasks
from kvray.store.nvme.writer import CLOSED, Writer, num_closed

_log = logging.getLogger("kvray.nvme")

OWNER_FILE = "owner"
_UNFIT = (
    errno.EACCES,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
)
"""Errors of a badly chosen directory; all others are its device's fault."""
_ROOT = np.zeros((1, 4), dtype="<u8")


class NvmeStore:
    """One process's NVMe tier, of which it is the only owner; all methods from any thread.

    `write`, `read`, `flush` and `close` wait for the device and belong into an executor. So does
    `reserve`, which searches all blocks for victims when the store is full. One write or flush runs
    at a time and others wait their turn; beside it any number of reads runs.

    A device that fails raises TierError.
    """

    def __init__(self, directory: Path, spec: NvmeSpec, *, disk: Disk | None = None) -> None:
        """Take `directory` over and find its blocks.

        Raises:
            CapacityError: the device has no room.
            ConfigError: the directory or the sizes cannot be used.
            ShardUnavailable: another process, or this one, has it open.
        """
        self.directory = directory
        self.geometry = spec.geometry()
        access = Access.of(spec.group)
        self._disk = disk or Disk(access)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """The writer's; it guards no state but the order of what is written."""
        self._is_closed = False
        memory = private(self.geometry.table_bytes)
        self.tables = Tables(memory, self.geometry, has_data=False)
        """Changed under the store's lock only; others may read them, and choose victims."""
        self._record_table = RecordTable(self.geometry)
        self._owner_file = _own(directory, access)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._owner_file.discard)
            self._disk.check_writable(directory)
            self._files = SegmentFiles(self._disk, directory, spec)
            on_failure.callback(self._files.close)
            self.report = recovery.read_tables(self._files, self._record_table, self.tables)
            on_failure.pop_all()
        self._threads = IoThreads(spec.io_threads)
        self._writer = Writer(
            self.tables, self._record_table, self._files, self._threads, self.section
        )
        self._idle = threading.Condition()
        self._num_reading = self._num_unreadable = self._num_refused = self._read_bytes = 0
        self._takes_reads = True

    def close(self) -> None:
        """Close the files and give the directory up; unflushed blocks may be lost.

        Waits for what is under way. Twice is fine.
        """
        with self._turn:
            if self._is_closed:
                return
            with self._idle:  # no read begins from now on, and none is under way
                self._takes_reads = False
                self._idle.wait_for(lambda: not self._num_reading)
            with self._lock:
                self._is_closed = True
            self._threads.close()
            self._files.close()
            self._owner_file.discard()

    def check_in_place(self) -> None:
        """Raise TierError if the directory's path no longer leads to the open files."""
        with device_errors(self.directory, "looked at"):
            if not self._owner_file.is_current():
                raise TierError(
                    f"{self.directory} was removed, unmounted or mounted over; mount the disk."
                )

    # -- tables only --------------------------------------------------------------------------

    def present(self, keys: Array, part: int) -> Array:
        """Return a mask of the `keys` (u64 [num_keys, 4]) that are here now; takes no lock."""
        return lease.present(self.tables, keys, part)

    def find(self, keys: Array, part: int) -> tuple[Array, Array]:
        """Return the slot of each of `keys`, and its bytes, 0: not here; takes no lock."""
        tables = self.tables
        found = key_index.find(tables, keys, part)
        is_here = (found >= 0) & (tables.slot_state[found] == READY)
        return found, np.where(is_here, tables.block_bytes(found), 0)

    def reserve(self, arena: Tables, path: Array) -> Demotion:
        """Reserve a slot for each block of a chain in an arena that is not here.

        Others are evicted if need be. `path` are the chain's slots of `arena`, in prefix order; the
        block before them there must be here or under way. Returns leading missing blocks, for
        `write` or `abort`. CapacityError: a segment holds no block of that size.
        """
        keys, first = arena.slot_key[path], int(path[0])
        block_bytes, part = int(arena.block_bytes(path[:1])[0]), int(arena.slot_part[first])
        if self.geometry.stride(block_bytes) > self.geometry.slab_bytes:
            raise CapacityError(
                f"A block of {block_bytes} bytes does not fit into a segment of"
                f" {self.geometry.slab_bytes}; raise nvme.segment."
            )
        before = int(arena.parents(path[:1])[0])
        parent = None if before < 0 else arena.slot_key[before : before + 1]
        candidates = slots.find_candidates(
            self.tables, keys, parent=parent, part=part, block_bytes=block_bytes
        )
        with self.section():
            made = slots.reserve(
                self.tables,
                keys,
                parent=parent,
                depth=int(arena.slot_depth[first]),
                part=part,
                block_bytes=block_bytes,
                holder=0,
                candidates=candidates,
                namespace=int(arena.slot_namespace[first]),
                priority=arena.slot_priority[path],
                head=int(arena.slot_head[first]),
            )
            assert made is not None, "the last try always has an answer"
            # The records of the candidates that it has evicted are written as empty.
            gone = np.concatenate((candidates.own, candidates.others))
            self._record_table.bury(gone[self.tables.slot_state[gone] != READY])
        above = np.vstack((_ROOT if parent is None else parent, keys[:-1]))
        rows = made.rows
        return Demotion(reservation=made, parents=above[rows], arena_slots=path[rows])

    def abort(self, demotion: Demotion) -> None:
        """Give back reserved slots that will not be written."""
        with self.section():
            slots.abort(self.tables, demotion.reservation)

    def touch(self, used: Array) -> None:
        """Note a use of blocks, in this tier or above: they do not go soon."""
        with self.section():
            self.tables.slot_tick[used] = self.tables.next_tick()

    def evict(self, victims: Array) -> Array:
        """Evict those of `victims` that can go without any other; return them."""
        with self.section():
            victims = keep_evictable(self.tables, victims)
            slots.evict(self.tables, victims)
            self._record_table.bury(victims)
        return victims

    def stats(self) -> NvmeStats:
        """Return the counts."""
        with self.section():
            tables, files = self.tables, list(self._files.by_slab.values())
            ready = self.geometry.by_slab(tables.slot_state == READY)
            strides = [
                self.geometry.stride(size) if 0 < size < CLOSED else 0
                for size in tables.slab_block_bytes.tolist()
            ]
            return NvmeStats(
                blocks=int(np.count_nonzero(ready)),
                block_bytes=int(ready.sum(axis=(1, 2)) @ np.array(strides, dtype=np.int64)),
                segments=len(files),
                file_bytes=self._files.file_bytes,
                segments_without_room=num_closed(tables),
                stored=tables.counts.stored,
                evicted=tables.counts.evicted,
                dropped=tables.counts.dropped,
                corrupt=tables.counts.corrupt - self._num_refused,
                unreadable=self._num_unreadable,
                written_bytes=self._writer.written_bytes,
                read_bytes=self._read_bytes,
                is_direct=self._disk.is_direct,
            )

    @contextlib.contextmanager
    def section(self) -> Iterator[bool]:
        """Hold the tables for a moment; a failure in here changes nothing."""
        with self._lock:
            self._check_open()
            try:
                yield True
            except BaseException:
                self.tables.undo.roll_back()
                raise
            self.tables.undo.settle()

    # -- with the device ----------------------------------------------------------------------

    def write(self, demotions: Sequence[Demotion], arena: Tables) -> list[Array]:
        """Write blocks of an arena to their reserved slots; settle the reservations in any case.

        Readers find the blocks once this returns, also after the death of the process; after a
        power loss only once `flush` has returned. In one call many chains share the price of a
        sync. `arena` are the arena's tables, with its data.

        Returns one mask a demotion of the stored blocks. The others had no room on the disk. After
        an exception nothing is stored. ConfigError, LayoutMismatch: a slot of the arena holds
        another block than the one it goes to, or one of another size.
        """
        with self._turn:
            self._check_open()
            return self._writer.write(demotions, arena)

    def flush(self, *, note_use: bool = False) -> None:
        """Return when all blocks that are READY now survive a power loss, and evicted ones do not.

        `note_use` also writes when blocks were used: at an orderly end, so that the next start
        evicts in the right order. If the device fails, the next flush tries again.
        """
        with self._turn:
            self._check_open()
            if note_use:
                self._note_use()
            self._writer.flush()

    def read(
        self, keys: Array, part: int, arena: Tables, arena_slots: Array
    ) -> tuple[Array, Array]:
        """Read blocks (u64 [num_keys, 4]) into slots reserved for them in an arena, and check them.

        Returns a mask of the keys whose blocks are there and have their checksum, and checksums,
        u64, to commit these.

        A wrong block goes out of service. So does one that the device refuses to read while it
        still gives the file's header: asked for again and again, it would count as a device that
        fails. The next opening finds that one again, as the fault may have passed. ConfigError,
        LayoutMismatch: a slot of the arena is reserved for another block, or for one of another
        size.
        """
        valid = np.zeros(len(keys), dtype=bool)
        checksums = np.zeros(len(keys), dtype="<u8")
        with self._under_way(), self._leased(keys, part) as found:
            rows = np.flatnonzero(found >= 0)
            held, into = found[rows], arena_slots[rows]
            check_same(self.tables, held, arena, into)
            sums = np.zeros(len(rows), dtype="<u8")
            unreadable = np.zeros(len(rows), dtype=bool)
            each = moves(self._files.by_slab, held, self.tables.geometry, arena, into)
            size = chunk_bytes(each, self._threads.num_threads)
            self._threads.run(
                [
                    task
                    for one in each
                    for task in read_tasks(one, chunk_bytes=size, sums=sums, unreadable=unreadable)
                ]
            )
            same = (sums == self.tables.slot_checksum[held]) & ~unreadable
            self._note(held, same, unreadable)
        checksums[rows], valid[rows] = sums, same
        return valid, checksums

    # -- private ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _leased(self, keys: Array, part: int) -> Iterator[Array]:
        """Lease the blocks that are here; yields the slot of each key, -1 where there is none."""
        with self.section():
            found = key_index.find(self.tables, keys, part)
            found[self.tables.slot_state[found] != READY] = -1
            held = found[found >= 0]
            self.tables.add(held, slot_leases=1)
        try:
            yield found
        finally:
            with self.section():
                self.tables.add(held, slot_leases=-1)

    def _note_use(self) -> None:
        """Write into the records when blocks were used."""
        with self.section():
            ready = np.flatnonzero(self.tables.slot_state == READY)
            records = self._record_table.records(ready)
            used = self.tables.slot_tick[ready]
            changed = records["used"] != used
            records["used"] = used
            self._record_table.put(ready[changed], records[changed])

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._idle:
            if not self._takes_reads:
                raise ShardUnavailable(
                    f"This process has closed the NVMe tier in {self.directory}."
                )
            self._num_reading += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    def _note(self, held: Array, same: Array, unreadable: Array) -> None:
        tables = self.tables
        bad, good, refused = held[~same & ~unreadable], held[same], held[unreadable]
        is_one_sector = len(refused) > 0 and self._gives_header(int(refused[0]))
        with self.section():
            if is_one_sector:
                before = tables.counts.corrupt
                slots.quarantine(tables, refused)
                self._num_refused += tables.counts.corrupt - before
            self._num_unreadable += len(refused)
            slots.quarantine(tables, bad)
            # The bytes that its record promises are lost, after a restart too.
            self._record_table.bury(bad)
            tables.slot_tick[good] = tables.next_tick()
            self._read_bytes += int(tables.block_bytes(good).sum())
        if len(bad):
            _log.error(
                "%d blocks of the NVMe tier do not have their checksum, the first of key %s; they"
                " are out of service",
                len(bad),
                tables.name(bad[0]),
            )
        if len(refused):
            _log.error(
                "The device of the NVMe tier refused to read %d blocks; look at it with `dmesg`",
                len(refused),
            )

    def _gives_header(self, slot: int) -> bool:
        """Return whether the device still reads the first page of the file of a slot."""
        try:
            self._files.by_slab[int(self.geometry.slab_of(slot))].file.read(
                [aligned(PAGE_BYTES)], 0
            )
        except TierError:
            return False
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShardUnavailable(f"This process has closed the NVMe tier in {self.directory}.")


def _own(directory: Path, access: Access) -> SideFile:
    """Take the owner's lock of a directory, which ends with this process.

    If more than nvme.dir itself is missing, nothing is made: a disk may not be mounted, and the
    directory would land on another one.
    """
    with device_errors(directory, "used for the NVMe tier"):
        try:
            directory.parent.mkdir(exist_ok=True)
            directory.mkdir(exist_ok=True, mode=0o700)
            access.check_own(directory)
            access.give_directory(directory)
            file = SideFile.at(directory / OWNER_FILE)
        except OSError as error:
            if error.errno not in _UNFIT:
                raise
            if not directory.parent.parent.exists():
                raise ConfigError(
                    f"The NVMe tier cannot be in {directory}, because {directory.parent.parent}"
                    " does not exist; mount the disk, or correct nvme.dir."
                ) from None
            raise ConfigError(
                f"{directory} cannot be used for the NVMe tier ({error.strerror}); make it a"
                " directory that this user may write to."
            ) from None
    if not file.try_lock(OWNER_BYTE):
        raise ShardUnavailable(
            f"Process {file.holder_of(OWNER_BYTE)} owns {directory}; end its tier with `kvray"
            " down`, or choose another directory for the NVMe tier."
        )
    return file
