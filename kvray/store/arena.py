"""A node's arena: one file in shared memory that every process of the node uses by itself.

The file describes itself (`layout`), its tables are changed under one lock (`lock`) in steps that
can be undone (`undo`), and what may be changed how stands in `slots` and `lease`. Invariants:

- Whoever takes the lock and finds a step begun undoes it first: its writer died.
- Only the holder of the lock writes tables; only a slot's reserver writes its bytes.
- A mapped arena is never truncated and never shrinks: its owner marks it RETIRED and unlinks it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvray.block import BlockKey
from kvray.errors import CapacityError, ConfigError, CorruptBlock, LeaseExpired, ShardUnavailable
from kvray.store import (
    arena_file,
    holders,
    key_index,
    lease,
    payload,
    repair,
    slots,
)
from kvray.store.arena_file import ARENA_FILE, ArenaSpec, Progress, lock_path
from kvray.store.copier import Copier
from kvray.store.figures import figures
from kvray.store.holders import Membership
from kvray.store.layout import DEFAULT_PRIORITY, LIVE, PRIORITY_MAX, READY
from kvray.store.lease import Held, Lease, Wanted
from kvray.store.lock import HOLDER_BYTES, ArenaLock, SideFile
from kvray.store.slots import Reservation
from kvray.store.tables import Array, Tables

__all__ = ["ARENA_FILE", "Arena", "ArenaSpec", "Progress", "lock_path"]

_PATIENT_S = 5.0
"""How long what is done behind the engine's back (committing, giving back) tries for the lock."""

_JOIN_WAIT_S = 0.5
"""How long joining and leaving try: at an engine's start and end, where somebody waits."""

_ROOM_TRIES = 4
"""How often a writer looks for blocks to evict that turn out to be in use, before it drops some."""


class PartRead(NamedTuple):
    """Slots of one part, and the pages that they are copied into."""

    slots: Array
    regions: Sequence[Array]
    """Bytes of shape [num_pages, size] each; end to end they fill a slot."""
    pages: Array
    """Rows of each region, one a slot."""


class Arena:
    """One process's access to an arena; all methods may be called from any thread.

    Methods that answer None or False found the lock taken for `lock_wait_s`: treat it as a miss
    (`arena_busy`), or try again. A retired arena gives no new lease and no new slot; what was
    taken before can still be read, written and given back.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float) -> None:
        """Map the arena in `directory`.

        Raises:
            ShardUnavailable: there is none, or it is of another format or retired.
        """
        self.directory = directory
        self.lock_wait_s = lock_wait_s
        self._tables: Tables | None = arena_file.map_file(directory / ARENA_FILE)
        self.arena_id = self._text("arena_id")
        self.cluster_name = self._text("cluster_name")
        try:
            # Not created here: a retired arena's must not come back.
            self.side_file = SideFile.at(lock_path(directory, self.arena_id), create=False)
        except OSError as error:
            self._tables = None  # whoever keeps the error shall not keep the arena mapped
            raise ShardUnavailable(
                f"The arena in {directory} has no lock file that can be opened"
                f" ({error.strerror}); it is being replaced, or restart the tier."
            ) from None
        self._lock = ArenaLock(self.side_file)
        self._copier = Copier()
        self._holder: int | None = None
        if self.retired:
            message = self.no_entry()
            self._tables = None
            raise ShardUnavailable(message)

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

        The file gets its name when it is complete, so nobody ever maps half an arena. One that
        has the name before must be retired first.

        Raises:
            CapacityError: it does not fit into the mount, the cgroup or the memory.
            ConfigError: the directory cannot be used, or the cluster's name is too long.
        """
        arena_file.create_file(directory, spec, progress)
        return cls(directory, lock_wait_s=lock_wait_s)

    def close(self) -> None:
        """Leave and unmap; views that others still have keep the mapping alive. Twice is fine."""
        if self._tables is not None:
            self.leave()
            self._copier.close()
            self._tables = None

    @property
    def tables(self) -> Tables:
        """The arena's tables; whoever changes them holds the lock.

        Raises:
            ShardUnavailable: the arena was closed.
        """
        tables = self._tables
        if tables is None:
            raise ShardUnavailable(f"This process has closed the arena in {self.directory}.")
        return tables

    # -- membership ---------------------------------------------------------------------------

    @property
    def retired(self) -> bool:
        """Whether the owner has given this arena up; detach and look for its successor."""
        return self.tables.state != LIVE

    @property
    def holder(self) -> int:
        """This process's row in the holder table.

        Raises:
            LeaseExpired: it has not joined, or has left.
        """
        holder = self._holder
        if holder is None:
            raise LeaseExpired("This process is no holder of the arena; call join first.")
        return holder

    @property
    def membership(self) -> Membership:
        """This process's row, and what tells it from whoever has that row later.

        Raises:
            LeaseExpired: it has not joined, or has left.
        """
        return Membership(self.holder, int(self.tables.holder_generation[self.holder]))

    def join(self, label: str) -> int:
        """Become a holder: what this process leases and reserves ends with it. Twice is fine.

        Raises:
            CapacityError: every row of the holder table is taken by a living process.
            ShardUnavailable: the lock could not be had, or the arena is retired.
        """
        with self.section(_JOIN_WAIT_S) as entered:
            refused = not entered or self.retired
            if not refused and self._holder is None:
                self._holder = holders.enter(
                    self.tables, self.side_file, label, now=time.monotonic()
                )
        if refused:
            raise ShardUnavailable(self.no_entry())
        if self._holder is None:
            raise CapacityError(
                "All holder rows of the arena are taken; raise arena.holders_max and restart the"
                " tier."
            )
        return self.holder

    def leave(self) -> None:
        """Give back all that this process holds; its copies must have ended. Twice is fine."""
        if self._holder is None:
            return
        with self.section(_JOIN_WAIT_S) as entered:
            # In the section, so that no other thread leases or reserves for a row that is gone.
            row, self._holder = self._holder, None
            # Without the lock, ending the liveness lock is enough: the owner buries the row.
            if entered and row is not None:
                holders.leave(self.tables, row)
        if row is not None:
            self.side_file.unlock(HOLDER_BYTES + row)

    # -- reading ------------------------------------------------------------------------------

    def lease(self, keys: Sequence[BlockKey], *, num_parts: int = 1) -> list[Lease] | None:
        """Lease the longest run of leading `keys` of which every part is here.

        Returns:
            One lease a part, all of the same length; [] if not even the first block is here;
            None if the arena was busy, or has too many leases for one more.

        Raises:
            ConfigError: `keys` are no keys, or num_parts < 1.
            LeaseExpired: this process is no holder.
        """
        readers = [[wanted] for wanted in _all_parts(num_parts)]
        held = self.lease_for(keys, readers)
        return held if held is None else list(held.leases)

    def lease_for(
        self,
        keys: Sequence[BlockKey],
        readers: Sequence[Sequence[Wanted]],
        *,
        member: Membership | None = None,
        lease_id: int | None = None,
    ) -> Held | None:
        """Lease the longest prefix of `keys` that has, for every reader, the parts it wants.

        Args:
            keys: keys in prefix order.
            readers: for each reader, such as a rank, the parts that its lease shall name.
            member: the process whose leases they are to be; None: this one's.
            lease_id: what all of them are to be known by, see `lease.id_of`; None: each by a
                number of its own.

        Returns:
            One lease a reader, which names the slots of its parts one part after the other; no
            lease if not even the first block is here, or `member` is a holder no more; None if
            the arena was busy, or has too many leases for one more.

        Raises:
            ConfigError: `keys` are no keys.
            LeaseExpired: this process is no holder, and no other was given.
        """
        packed = key_index.pack_keys(keys)
        own = self.holder if member is None else None
        with self.section(self.lock_wait_s) as entered:
            if not entered or self.retired or (own is not None and self._holder != own):
                return None
            if member is not None and not holders.is_member(self.tables, member):
                return Held(num_blocks=0, leases=())
            holder = self.holder if member is None else member.row
            wanted = dict.fromkeys(one for reader in readers for one in reader)
            run, slots = lease.match(self.tables, packed, wanted)
            if not run:
                return Held(num_blocks=0, leases=())
            chosen = [lease.joined(slots, reader) for reader in readers]
            now = time.monotonic()
            taken = lease.take(self.tables, chosen, holder=holder, now=now, lease_id=lease_id)
            return None if taken is None else Held(num_blocks=run, leases=tuple(taken))

    def lease_slots(self, chosen: Array) -> Lease | None:
        """Lease those of `chosen` that are READY, whatever they hold; None if the arena was busy.

        To be looked at so is no use: what is evicted next does not change.

        Raises:
            LeaseExpired: this process is no holder.
        """
        holder = self.holder
        with self.section(self.lock_wait_s) as entered:
            if not entered or not self._is_open(holder):
                return None
            ready = chosen[self.tables.slot_state[chosen] == READY]
            now = time.monotonic()
            taken = lease.take(self.tables, [ready], holder=holder, now=now, is_use=False)
            return None if taken is None else taken[0]

    def match(self, keys: Sequence[BlockKey], *, num_parts: int = 1) -> int | None:
        """Return how many leading `keys` are here now, without holding them; None if busy."""
        packed = key_index.pack_keys(keys)
        with self.section(self.lock_wait_s) as entered:
            if not entered or self.retired:
                return None
            return lease.match(self.tables, packed, _all_parts(num_parts))[0]

    def present(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Array]:
        """Return which of `keys` are here now, as one mask a part.

        Read without the lock, so that nobody waits for a long prompt: what changes meanwhile may
        be told wrongly, and only a lease says what stays.
        """
        packed = key_index.pack_keys(keys)
        return [lease.present(self.tables, packed, part) for part in parts]

    def release(self, *leases: Lease, wait_s: float | None = None) -> bool:
        """End leases, of whichever process of this node; False if busy: retry."""
        if not leases:
            return True
        with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            for one in leases if entered else ():
                lease.release(self.tables, one)
            return entered

    def release_ids(self, lease_ids: Iterable[int]) -> bool:
        """End all leases that are known by these, whoever took them; False if busy: retry.

        Nobody may take one of these ids meanwhile: they are searched for without the lock.
        """
        found = [(one, lease.records(self.tables, one)) for one in lease_ids]
        found = [(one, pages) for one, pages in found if len(pages)]
        if not found:
            return True
        with self.section(self.lock_wait_s) as entered:
            for one, pages in found if entered else ():
                lease.release_records(self.tables, one, pages)
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
            ConfigError: the lease has not that many blocks.
            CorruptBlock: a block has not its checksum; its slot is quarantined.
            LayoutMismatch: the pool's blocks are of another size.
            LeaseExpired: the lease was released, perhaps during the copy.
        """
        chosen = self.leased_slots(held)[first : first + len(block_ids)]
        sound = payload.read(
            self.tables, chosen, pool, block_ids, verify=verify, copier=self._copier
        )
        self._refuse_unsound(held, chosen, sound)

    def read_slots(self, reads: Sequence[PartRead]) -> None:
        """Copy slots into pages; the caller holds a lease on them, and calls `check` afterwards.

        Raises:
            LayoutMismatch: the pages are of another size.
        """
        for one in reads:
            payload.read_regions(self.tables, one.slots, one.regions, one.pages)

    def check(self, held: Lease, chosen: Array, *, verify: bool) -> None:
        """Let what was read of the leased slots `chosen` pass.

        Raises:
            CorruptBlock: with `verify`, one has not its checksum; else, one was found to be wrong.
            LeaseExpired: the lease was released, perhaps during the copy.
        """
        sound = payload.verify(self.tables, chosen) if verify else None
        self._refuse_unsound(held, chosen, sound)

    def sound(self, held: Lease, places: Array | slice) -> Array:
        """Return which blocks of a lease have their checksum, as a mask of `places`.

        A block that has not is quarantined.

        Args:
            held: the lease.
            places: the blocks to look at, by their place in the lease.

        Raises:
            LeaseExpired: the lease was released.
        """
        chosen = self.leased_slots(held)[places]
        sound = self._is_sound(held, chosen, payload.verify(self.tables, chosen))
        if not sound.all():
            self.quarantine(chosen[~sound])
        return sound

    def quarantine(self, chosen: Array, *, wait_s: float | None = None) -> None:
        """Take slots whose bytes proved wrong out of service; if busy, the next reader will."""
        with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
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
        namespace: int = 0,
        priority: int | Array = DEFAULT_PRIORITY,
        needs_parent: bool = True,
        wait_s: float | None = None,
    ) -> Reservation | None:
        """Reserve slots for the `keys` that are not here; None if the arena was busy.

        Args:
            keys: keys in prefix order.
            parent: key before the first one; None at the root.
            depth: place of the first key in its chain.
            part: part that will be written.
            block_bytes: bytes of the part.
            namespace: whose the blocks are, see `block.namespace_id`; 0: not known.
            priority: retention priority, 0 to 100: what is lower goes first. One, or one a key;
                of a block that is here the higher one holds.
            needs_parent: whether nothing is reserved if `parent` is not here.
            wait_s: longest try for the lock; None: `lock_wait_s`.

        Raises:
            CapacityError: a block of this size fits into no slab.
            ConfigError: `keys` are no keys or not all different, or a number is out of range.
            LeaseExpired: this process is no holder.
        """
        packed, holder = key_index.pack_keys(keys), self.holder
        _check_place(packed, depth=depth, part=part, block_bytes=block_bytes)
        priority = _checked_priority(priority, len(packed))
        geometry = self.tables.geometry
        if geometry.stride(block_bytes) > geometry.slab_bytes:
            raise CapacityError(
                f"A block of {block_bytes} bytes is larger than a slab of {geometry.slab_bytes};"
                " raise arena.slab, and arena.capacity to at least four slabs."
            )
        before = None if parent is None else key_index.pack_keys([parent])
        candidates = slots.Candidates()  # mostly nothing has to go
        for attempt in range(_ROOM_TRIES):
            is_last = attempt == _ROOM_TRIES - 1 or (attempt > 0 and not candidates)
            with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
                if not entered or not self._is_open(holder):
                    return None
                made = slots.reserve(
                    self.tables,
                    packed,
                    parent=before,
                    depth=depth,
                    part=part,
                    block_bytes=block_bytes,
                    holder=holder,
                    candidates=candidates,
                    namespace=namespace,
                    priority=priority,
                    needs_parent=needs_parent,
                    is_last=is_last,
                )
            if made is not None:
                return made
            candidates = slots.find_candidates(
                self.tables, packed, parent=before, part=part, block_bytes=block_bytes
            )
        raise AssertionError("the last try makes do with what there is")

    def write(self, reservation: Reservation, pool: Array, block_ids: Array) -> Array:
        """Copy blocks into reserved slots; return their checksums for `commit`.

        `block_ids` has one row of `pool` for each *reserved* key.
        """
        return payload.write(self.tables, reservation.slots, pool, block_ids, copier=self._copier)

    def write_slots(self, slots: Array, regions: Sequence[Array], pages: Array) -> Array:
        """Copy pages that consist of `regions` into reserved slots; else as `write`."""
        if len(regions) == 1:
            return payload.write(self.tables, slots, regions[0], pages, copier=self._copier)
        return payload.write_regions(self.tables, slots, regions, pages)

    def sums(self, reservation: Reservation) -> Array:
        """Return the checksums of reserved slots that something else has written, for `commit`."""
        return payload.sum_slots(self.tables, reservation.slots)

    def slot_bytes(self, slot: int) -> Array:
        """Return the bytes of a slot that this process has reserved, or that it was told of."""
        return payload.slot_bytes(self.tables, slot)

    def commit(
        self, reservation: Reservation, checksums: Array, *, wait_s: float = _PATIENT_S
    ) -> bool:
        """Make written slots READY; False if busy: retry.

        Slots that this process has given back since, by `abort` or `leave`, are passed over.

        Raises:
            ConfigError: there is not one checksum for each reserved slot.
        """
        sums = np.asarray(checksums, dtype="<u8")
        if sums.shape != reservation.slots.shape:
            raise ConfigError(
                f"{len(reservation.slots)} slots cannot be committed with checksums of shape"
                f" {list(sums.shape)}; give what write returned."
            )
        if not len(sums):
            return True
        with self.section(wait_s) as entered:
            if entered:
                slots.commit(self.tables, reservation, sums)
            return entered

    def abort(self, reservation: Reservation, *, wait_s: float = _PATIENT_S) -> bool:
        """Give reserved slots back unwritten; False if busy: retry."""
        if not len(reservation.slots) or self._holder is None:
            return True
        with self.section(wait_s) as entered:
            if entered:
                slots.abort(self.tables, reservation)
            return entered

    def stats(self) -> dict[str, Any]:
        """Return figures for people; read without the lock, so they may be a moment apart."""
        return {"arena_id": self.arena_id, **figures(self.tables)}

    @contextmanager
    def section(self, wait_s: float, *, may_rebuild: bool = False) -> Iterator[bool]:
        """Hold the lock; False: it was taken, or the tables have to be rebuilt by the owner.

        What is written inside stands when the section ends, or not at all: an exception undoes
        it here, a death is undone by whoever comes next.
        """
        if not self._lock.acquire(wait_s):
            yield False
            return
        undo = self.tables.undo
        try:
            entered = not undo.is_open or self._repair(may_rebuild=may_rebuild)
            yield entered
            if entered:
                undo.settle()
        except BaseException:
            undo.roll_back()
            raise
        finally:
            self._lock.release()

    def no_entry(self) -> str:
        """Return a sentence that says why a section was not entered."""
        if self.side_file.detached:
            return "A forked process cannot use its parent's arena; start it with spawn instead."
        if self.retired:
            return f"The arena in {self.directory} is retired; open its successor."
        return f"The arena in {self.directory} stays locked; try again."

    # -- inside -------------------------------------------------------------------------------

    def _repair(self, *, may_rebuild: bool) -> bool:
        """Undo what somebody who died had begun; False if only the owner can mend it."""
        if not self.tables.undo.roll_back():
            if not may_rebuild:
                return False
            repair.rebuild(self.tables, now=time.monotonic())
        self.tables.repairs += 1
        return True

    def _text(self, field: str) -> str:
        text: bytes = self.tables.header[field].item()
        return text.decode(errors="replace")

    def _is_open(self, holder: int) -> bool:
        """Whether `holder` may take something new: another thread may have left or retired."""
        return self._holder == holder and not self.retired

    def _refuse_unsound(self, held: Lease, chosen: Array, sound: Array | None) -> None:
        bad = chosen[~self._is_sound(held, chosen, sound)]
        if len(bad):
            self.quarantine(bad)
            raise CorruptBlock(
                f"Block {_name(self.tables, bad)} in the host tier does not have its checksum; it"
                " is quarantined."
            )

    def _is_sound(self, held: Lease, chosen: Array, sound: Array | None) -> Array:
        """Return a mask of the blocks that may be used, once they have been copied or summed."""
        if lease.leased_slots(self.tables, held) is None:
            raise LeaseExpired(
                f"Lease {held.lease_id} ended while its blocks were read; what was read is void."
            )
        ready: Array = self.tables.slot_state[chosen] == READY
        return ready if sound is None else ready & sound


def _all_parts(num_parts: int) -> list[Wanted]:
    if num_parts < 1:
        raise ConfigError(f"num_parts must be at least 1, not {num_parts}.")
    return [Wanted(part) for part in range(num_parts)]


def _check_place(keys: Array, *, depth: int, part: int, block_bytes: int) -> None:
    """Refuse what would be found wrong only when the tables are half changed."""
    words = np.sort(keys[:, 0])
    if (words[1:] == words[:-1]).any() and len(np.unique(keys, axis=0)) < len(keys):
        raise ConfigError("The keys to reserve are not all different; give each block once.")
    if not (0 <= part < 2**31 and 0 <= depth < 2**31):
        raise ConfigError(f"A block cannot be part {part} at depth {depth}; both count from 0.")
    if block_bytes < 1:
        raise ConfigError(f"A block must have at least 1 byte, not {block_bytes}.")


def _checked_priority(priority: int | Array, count: int) -> int | Array:
    """Return one priority, or one for each of `count` keys as u8; refuse what is none."""
    if isinstance(priority, int) and 0 <= priority <= PRIORITY_MAX:
        return priority
    asked = np.asarray(priority)
    if asked.shape not in ((), (count,)) or ((asked < 0) | (asked > PRIORITY_MAX)).any():
        raise ConfigError(
            f"A retention priority is a number from 0 to {PRIORITY_MAX}, one for all blocks or one"
            f" for each of the {count}."
        )
    return asked.astype(np.uint8) if asked.shape else int(asked)


def _name(tables: Tables, chosen: Array) -> str:
    """Return the first key of `chosen` as people see it: 8 hex digits."""
    return bytes(tables.slot_key[chosen[0]].tobytes()).hex()[:8]
