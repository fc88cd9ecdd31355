"""A node's arena: one file in shared memory that every process of the node uses by itself.

The file describes itself (`layout`), its tables are changed under one lock (`lock`) inside a
marked *section*, and what may be changed how stands in `slots` and `lease`. Invariants:

- A section that finds the mark set knows that its setter died inside, and rebuilds first.
- Only the holder of the lock writes tables; only a slot's reserver writes its bytes.
- A mapped arena is never truncated and never shrinks: its owner marks it RETIRED and unlinks it.
"""

import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvray.block import BlockKey
from kvray.errors import CapacityError, CorruptBlock, LeaseExpired, ShardUnavailable
from kvray.store import key_index, lease, payload, repair, slots
from kvray.store.capacity import check_room
from kvray.store.layout import (
    FORMAT_VERSION,
    FREE,
    HEADER,
    LABEL_BYTES,
    LIMBO,
    LIVE,
    MAGIC,
    QUARANTINED,
    READY,
    RETIRED,
    Geometry,
)
from kvray.store.lease import Lease
from kvray.store.lock import HOLDER_BYTES, ArenaLock, SideFile
from kvray.store.slots import Reservation
from kvray.store.tables import Array, Tables

ARENA_FILE = "arena"
_PREFAULT_CHUNK = 256 * 2**20
_POPULATE_WRITE = 23
_PATIENT_S = 5.0
"""How long what must succeed (joining, releasing) tries for the lock."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpec:
    """What an owner asks of a new arena; sizes in bytes."""

    cluster_name: str
    capacity: int
    slab: int
    slot_min: int
    holders_max: int

    def geometry(self) -> Geometry:
        """Return the figures that a file of this spec has."""
        return Geometry.fit(
            capacity=self.capacity,
            slab=self.slab,
            slot_min=self.slot_min,
            holders_max=self.holders_max,
        )


class Arena:
    """One process's access to an arena; all methods may be called from any thread.

    Methods that answer None found the lock taken for `lock_wait_s`: treat it as a miss
    (`arena_busy`).
    """

    def __init__(self, directory: Path, *, lock_wait_s: float) -> None:
        """Map the arena in `directory`.

        Raises:
            ShardUnavailable: there is none, or it is of another format or retired.
        """
        self.directory = directory
        self.lock_wait_s = lock_wait_s
        mapping, geometry = _map(directory / ARENA_FILE)
        self.tables = Tables(mapping, geometry)
        header = self.tables.header
        self.arena_id: str = bytes(header["arena_id"]).decode()
        self.cluster_name: str = bytes(header["cluster_name"]).decode()
        self._side_file = SideFile.at(lock_path(directory, self.arena_id))
        self._lock = ArenaLock(self._side_file)
        self._holder: int | None = None

    @classmethod
    def create(
        cls,
        directory: Path,
        spec: ArenaSpec,
        *,
        lock_wait_s: float,
        progress: Progress = lambda done, total: None,
    ) -> "Arena":
        """Make, prefault and map a new arena; only the node's owner may.

        The file gets its name when it is complete, so nobody ever maps half an arena.

        Raises:
            CapacityError: it does not fit into the mount, the cgroup or the memory.
        """
        geometry = spec.geometry()
        check_room(directory, geometry.file_bytes)
        arena_id = secrets.token_hex(8)
        path = directory / f"{ARENA_FILE}.{arena_id}.new"
        try:
            _build(path, geometry, spec.cluster_name, arena_id, progress)
            os.rename(path, directory / ARENA_FILE)
        finally:
            path.unlink(missing_ok=True)
        return cls(directory, lock_wait_s=lock_wait_s)

    # -- membership ---------------------------------------------------------------------------

    @property
    def retired(self) -> bool:
        """Whether the owner has given this arena up; detach and look for its successor."""
        return int(self.tables.header["state"]) != LIVE

    @property
    def holder(self) -> int:
        """This process's row in the holder table."""
        if self._holder is None:
            raise LeaseExpired("This process has not joined the arena; call join first.")
        return self._holder

    def join(self, label: str) -> int:
        """Become a holder: what this process leases and reserves ends with it.

        Raises:
            CapacityError: every row of the holder table is taken by a living process.
            ShardUnavailable: the lock could not be had.
        """
        with self._section(_PATIENT_S) as entered:
            if not entered:
                raise ShardUnavailable(f"The arena in {self.directory} stays locked; try again.")
            for row in range(self.tables.geometry.holders_max):
                # A row that is marked live but whose byte is free belonged to a dead process.
                if self._side_file.try_lock(HOLDER_BYTES + row):
                    if self.tables.holder_live[row]:
                        self._bury(row)
                    self._enter(row, label)
                    return row
        raise CapacityError(
            "All holder rows of the arena are taken; raise arena.holders_max and restart the tier."
        )

    def leave(self) -> None:
        """Give back all that this process holds; its copies must have ended. Twice is fine."""
        if self._holder is None:
            return
        row, self._holder = self._holder, None
        with self._section(_PATIENT_S) as entered:
            # Without the lock, ending the liveness lock is enough: the owner buries the row.
            if entered:
                mine = self.tables.slot_holder == row + 1
                slots.free(self.tables, np.flatnonzero(mine))
                lease.release_holder(self.tables, row)
                self.tables.holder_live[row] = 0
        self._side_file.unlock(HOLDER_BYTES + row)

    # -- reading ------------------------------------------------------------------------------

    def lease(self, keys: Sequence[BlockKey], *, num_parts: int = 1) -> list[Lease] | None:
        """Lease the longest run of leading `keys` of which every part is here.

        Returns:
            One lease a part, all of the same length; [] if not even the first block is here;
            None if the arena was busy.
        """
        packed, holder = key_index.pack_keys(list(keys)), self.holder
        with self._section(self.lock_wait_s) as entered:
            if not entered:
                return None
            found = lease.match(self.tables, packed, num_parts)
            if not found.shape[1]:
                return []
            now = time.monotonic()
            taken = [lease.take(self.tables, part, holder=holder, now=now) for part in found]
            leases = [one for one in taken if one is not None]
            if len(leases) < num_parts:
                for one in leases:
                    lease.release(self.tables, one)
                return []
            return leases

    def match(self, keys: Sequence[BlockKey], *, num_parts: int = 1) -> int | None:
        """Return how many leading `keys` are here now, without holding them; None if busy."""
        packed = key_index.pack_keys(list(keys))
        with self._section(self.lock_wait_s) as entered:
            return lease.match(self.tables, packed, num_parts).shape[1] if entered else None

    def release(self, *leases: Lease, wait_s: float | None = None) -> bool:
        """End leases, of whichever process of this node; False if busy: retry."""
        with self._section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            for one in leases if entered else ():
                lease.release(self.tables, one)
            return entered

    def leased_slots(self, held: Lease) -> Array:
        """Return the slots of a lease, in prefix order.

        Raises:
            LeaseExpired: it was released.
        """
        found = lease.leased_slots(self.tables, held)
        if found is None:
            raise LeaseExpired(f"Lease {held.lease_id} has ended; its blocks cannot be read.")
        return found

    def read(
        self, held: Lease, pool: Array, block_ids: Array, *, first: int = 0, verify: bool
    ) -> None:
        """Copy leased blocks into `pool`.

        Args:
            held: the lease.
            pool: bytes of shape [num_blocks, block_bytes].
            block_ids: rows of `pool` for the blocks from `first` on.
            first: first block of the lease to copy.
            verify: check every block after its copy.

        Raises:
            CorruptBlock: the copy has not the checksum; the slot is quarantined.
            LeaseExpired: the lease was released.
        """
        chosen = self.leased_slots(held)[first : first + len(block_ids)]
        sound = payload.read(self.tables, chosen, pool, block_ids, verify=verify)
        if sound is not None and not sound.all():
            self.quarantine(chosen[~sound])
            raise CorruptBlock(
                f"Block {_name(self.tables, chosen[~sound])} changed while it was copied from"
                " the host tier; it is quarantined."
            )

    def sound_run(self, held: Lease, *, first: int = 0) -> int:
        """Return how many blocks of a lease from `first` on have their checksum.

        A block that has not is quarantined.
        """
        chosen = self.leased_slots(held)[first:]
        if not len(chosen):
            return 0
        slab = int(chosen[0]) // self.tables.geometry.slots_per_slab
        sound = payload.verify(self.tables, chosen, int(self.tables.slab_block_bytes[slab]))
        if sound.all():
            return len(chosen)
        self.quarantine(chosen[~sound])
        return int(sound.argmin())

    def quarantine(self, chosen: Array) -> None:
        """Take slots whose bytes proved wrong out of service."""
        with self._section(_PATIENT_S) as entered:
            if entered:
                slots.quarantine(self.tables, chosen)

    # -- writing ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey | None,
        depth: int,
        part: int,
        block_bytes: int,
        wait_s: float | None = None,
    ) -> Reservation | None:
        """Reserve slots for the `keys` that are not here; None if the arena was busy.

        Args:
            keys: keys in prefix order.
            parent: key before the first one; None at the root.
            depth: place of the first key in its chain.
            part: part that will be written.
            block_bytes: bytes of the part.
            wait_s: longest try for the lock; None: `lock_wait_s`.

        Raises:
            CapacityError: a block of this size fits into no slab.
        """
        geometry = self.tables.geometry
        if geometry.stride(block_bytes) > geometry.slab_bytes:
            raise CapacityError(
                f"A block of {block_bytes} bytes is larger than a slab of {geometry.slab_bytes};"
                " raise arena.slab, and arena.capacity to at least four slabs."
            )
        packed, holder = key_index.pack_keys(list(keys)), self.holder
        before = None if parent is None else key_index.pack_keys([parent])
        with self._section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            if not entered:
                return None
            return slots.reserve(
                self.tables,
                packed,
                parent=before,
                depth=depth,
                part=part,
                block_bytes=block_bytes,
                holder=holder,
            )

    def write(self, reservation: Reservation, pool: Array, block_ids: Array) -> Array:
        """Copy blocks into reserved slots; return their checksums for `commit`.

        `block_ids` has one row of `pool` for each *reserved* key.
        """
        return payload.write(self.tables, reservation.slots, pool, block_ids)

    def commit(
        self, reservation: Reservation, checksums: Array, *, wait_s: float = _PATIENT_S
    ) -> bool:
        """Make written slots READY; False if busy: retry."""
        with self._section(wait_s) as entered:
            if entered:
                slots.commit(self.tables, reservation.slots, checksums, holder=self.holder)
            return entered

    def abort(self, reservation: Reservation, *, wait_s: float = _PATIENT_S) -> bool:
        """Give reserved slots back unwritten; False if busy: retry."""
        with self._section(wait_s) as entered:
            if entered:
                slots.abort(self.tables, reservation.slots, holder=self.holder)
            return entered

    # -- the owner's part ---------------------------------------------------------------------

    def adopt(self) -> int:
        """Take over as owner: fence off the owner before; return the new shard_epoch."""
        with self._section(_PATIENT_S) as entered:
            if not entered:
                raise ShardUnavailable(f"The arena in {self.directory} stays locked; try again.")
            self.tables.header["shard_epoch"] += 1
            return int(self.tables.header["shard_epoch"])

    def bury_dead(self, *, limbo_s: float) -> list[str]:
        """End what dead holders held; return their labels."""
        labels, now = [], time.monotonic()
        dead = [
            int(row)
            for row in np.flatnonzero(self.tables.holder_live)
            if self._side_file.holder_of(HOLDER_BYTES + int(row)) is None
        ]
        limbo = self.tables.slot_state >= LIMBO
        if not dead and not limbo.any():
            return []
        with self._section(_PATIENT_S) as entered:
            for row in dead if entered else ():
                labels.append(bytes(self.tables.holder_label[row]).decode(errors="replace"))
                self._bury(row)
            if entered:
                slots.reclaim(self.tables, before=now - limbo_s)
        return labels

    def evict_ahead(self, free_target: float) -> int:
        """Evict until a `free_target` share of each full block size is free; return how many."""
        evicted = 0
        tables = self.tables
        if (tables.slab_block_bytes == 0).mean() >= free_target:
            return 0
        for size in np.unique(tables.slab_block_bytes):
            if size == 0:
                continue
            within = slots.slots_of(tables, np.flatnonzero(tables.slab_block_bytes == size), size)
            short = int(len(within) * free_target) - np.count_nonzero(
                tables.slot_state[within] == FREE
            )
            if short <= 0:
                continue
            with self._section(self.lock_wait_s) as entered:
                if entered:
                    evicted += slots.evict(tables, short, within=within, protect=within[:0])
        return evicted

    def changes_since(self, seen: Array) -> tuple[Array, Array, Array]:
        """Return what became or ceased to be READY since `seen`, and bring `seen` up to date.

        Args:
            seen: the slot versions at the last call, u32 [num_slots]; changed in place.

        Returns:
            (slots that changed, mask of those READY now, their keys).
        """
        with self._section(_PATIENT_S) as entered:
            if not entered:
                none = np.empty(0, dtype=np.int64)
                return none, none.astype(bool), self.tables.slot_key[none]
            changed = np.flatnonzero(self.tables.slot_version != seen)
            seen[changed] = self.tables.slot_version[changed]
            ready = self.tables.slot_state[changed] == READY
            return changed, ready, self.tables.slot_key[changed].copy()

    def clear(self) -> int:
        """Evict every block that nobody leases; return how many."""
        with self._section(_PATIENT_S) as entered:
            everything = np.arange(self.tables.geometry.num_slots)
            if not entered:
                raise ShardUnavailable(f"The arena in {self.directory} stays locked; try again.")
            return slots.evict(
                self.tables, len(everything), within=everything, protect=everything[:0]
            )

    def retire(self) -> None:
        """End this arena: its holders detach; the file and its side file are unlinked."""
        self.tables.header["state"] = RETIRED
        (self.directory / ARENA_FILE).unlink(missing_ok=True)
        self._side_file.path.unlink(missing_ok=True)

    def stats(self) -> dict[str, Any]:
        """Return figures for people; read without the lock, so they may be a moment apart."""
        tables, geometry = self.tables, self.tables.geometry
        ready = tables.slot_state == READY
        per_slab = ready.reshape(geometry.num_slabs, -1).sum(axis=1)
        header = tables.header
        return {
            "arena_id": self.arena_id,
            "shard_epoch": int(header["shard_epoch"]),
            "capacity_bytes": geometry.capacity,
            "resident_bytes": int((per_slab * tables.slab_block_bytes).sum()),
            "blocks": int(ready.sum()),
            "leased_blocks": int((tables.slot_leases > 0).sum()),
            "quarantined_blocks": int((tables.slot_state == QUARANTINED).sum()),
            "holders": int(tables.holder_live.sum()),
            **{
                name: int(header[name])
                for name in ("stored", "evicted", "dropped", "corrupt", "repairs")
            },
        }

    # -- inside -------------------------------------------------------------------------------

    @contextmanager
    def _section(self, wait_s: float) -> Iterator[bool]:
        """Hold the lock and mark the section; yields False if the lock was not to be had.

        An exception leaves the mark set: whoever comes next rebuilds.
        """
        if self.retired or not self._lock.acquire(wait_s):
            yield False
            return
        try:
            if self.tables.header["section"]:
                repair.rebuild(self.tables)
            self.tables.header["section"] = 1
            yield True
            self.tables.header["section"] = 0
        finally:
            self._lock.release()

    def _enter(self, row: int, label: str) -> None:
        tables = self.tables
        tables.holder_generation[row] += 1
        tables.holder_pid[row] = os.getpid()
        tables.holder_since[row] = time.monotonic()
        tables.holder_label[row] = label.encode()[:LABEL_BYTES]
        tables.holder_live[row] = 1
        self._holder = row

    def _bury(self, row: int) -> None:
        lease.release_holder(self.tables, row)
        slots.strand(self.tables, row, now=time.monotonic())
        self.tables.holder_live[row] = 0


def lock_path(directory: Path, arena_id: str) -> Path:
    """Return the side file of an arena: one name belongs to one inode for ever."""
    return directory / f"lock.{arena_id}"


def _map(path: Path) -> tuple[mmap.mmap, Geometry]:
    """Map an arena file after checking that its header is one that this code understands."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ShardUnavailable(
            f"There is no arena at {path} ({error.strerror}); start the tier with `kvray up`."
        ) from None
    try:
        size = os.fstat(fd).st_size
        head = os.pread(fd, HEADER.itemsize, 0)
        if len(head) < HEADER.itemsize:
            raise ShardUnavailable(f"{path} is too short to be an arena.")
        header = np.frombuffer(head, HEADER)[0]
        if header["magic"] != MAGIC or int(header["format_version"]) != FORMAT_VERSION:
            raise ShardUnavailable(
                f"{path} is no arena of format {FORMAT_VERSION}; restart the tier with the same"
                " kvray version as the engine."
            )
        figures = ("capacity", "slab_bytes", "slot_min", "holders_max")
        geometry = Geometry(**{name: int(header[name]) for name in figures})
        if size != geometry.file_bytes:
            raise ShardUnavailable(f"{path} has {size} bytes instead of {geometry.file_bytes}.")
        return mmap.mmap(fd, size), geometry
    finally:
        os.close(fd)


def _build(
    path: Path, geometry: Geometry, cluster_name: str, arena_id: str, progress: Progress
) -> None:
    """Write a complete arena file: memory allocated and touched, tables empty, header last."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        total = geometry.file_bytes
        os.ftruncate(fd, total)
        mapping = mmap.mmap(fd, total)
        for start in range(0, total, _PREFAULT_CHUNK):
            length = min(_PREFAULT_CHUNK, total - start)
            # Allocated first: a full mount must be an error here, not a SIGBUS in some copy.
            os.posix_fallocate(fd, start, length)
            mapping.madvise(_POPULATE_WRITE, start, length)
            progress(start + length, total)
    except OSError as error:
        raise CapacityError(
            f"The arena's {total} bytes could not be had in {path.parent} ({error.strerror});"
            " lower arena.capacity."
        ) from None
    finally:
        os.close(fd)
    header = np.ndarray((), HEADER, mapping)
    header["format_version"] = FORMAT_VERSION
    header["state"] = LIVE
    header["cluster_name"] = cluster_name.encode()
    header["arena_id"] = arena_id.encode()
    header["capacity"] = geometry.capacity
    header["slab_bytes"] = geometry.slab_bytes
    header["slot_min"] = geometry.slot_min
    header["holders_max"] = geometry.holders_max
    header["magic"] = MAGIC


def _name(tables: Tables, chosen: Array) -> str:
    """Return the first key of `chosen` as people see it: 8 hex digits."""
    return bytes(tables.slot_key[chosen[0]].tobytes()).hex()[:8]
