"""One process's place in an arena: its mapping, its row among the holders, and the lock section.

The file describes itself (`layout`). Its tables change under one lock (`machine.lock`), in steps
that can be undone (`undo`). `slots` and `lease` say what a step may change. Invariants:

- A taker of the lock who finds a step half done undoes it first: its writer died.
- Only the holder of the lock writes tables; only a slot's reserver writes its bytes.
- A mapped arena is never truncated and never shrinks: its owner marks it RETIRED and unlinks it.

Its figures are for people. Copies run over neighbouring slots of one slab. So free slots of a block
size count as fragmented where they lie outside the longest free run of their slab.
"""

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvray.errors import CapacityError, CorruptBlock, KVRayError, LeaseExpired, ShardUnavailable
from kvray.store.arena import audit, holders, key_index, lease, quotas, slabs
from kvray.store.arena import file as arena_file
from kvray.store.arena.file import ARENA_FILE, ArenaSpec, lock_path
from kvray.store.arena.layout import FREE, LIVE, QUARANTINED, READY
from kvray.store.arena.lease import Lease, Membership
from kvray.store.arena.prefault import Progress
from kvray.store.arena.tables import Array, Tables
from kvray.store.machine.lock import ArenaLock
from kvray.store.machine.side_file import HOLDER_BYTES, SideFile

_Mapped = TypeVar("_Mapped", bound="MappedArena")

_JOIN_WAIT_S = 0.5
"""How long joining and leaving try: at an engine's start and end, where somebody waits."""

_DAMAGE = (LookupError, ArithmeticError, ValueError)
"""Errors of numpy and Python at numbers that make no sense."""


class MappedArena:
    """An arena that this process has mapped; all methods may be called from any thread.

    The owner and the commands for people need no more. `Arena` adds what engines do.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float) -> None:
        """Map the arena in `directory`.

        ShardUnavailable: there is none, or it is of another format or retired.
        """
        self.directory = directory
        self.lock_wait_s = lock_wait_s
        self.tables: Tables = arena_file.map_file(directory / ARENA_FILE)
        """Changed under the lock only; ShardUnavailable: the arena was closed."""
        self.arena_id = self._text("arena_id")
        self.cluster_name = self._text("cluster_name")
        try:
            # Not created here: a retired arena's lock file must not come back.
            self.side_file = SideFile.at(lock_path(directory, self.arena_id), create=False)
        except OSError as error:
            del self.tables  # a kept error must not keep the arena mapped
            raise ShardUnavailable(
                f"The arena in {directory} has no lock file that can be opened"
                f" ({error.strerror}); it is being replaced, or restart the tier."
            ) from None
        self._lock = ArenaLock(self.side_file, self.tables.waiting)
        self._holder: int | None = None
        self._joined_as: Membership | None = None
        self.making_sense = _MakingSense(self)
        if self.retired:
            message = self.no_entry()
            self._unmap()
            raise ShardUnavailable(message)

    @classmethod
    def create(
        cls: type[_Mapped],
        directory: Path,
        spec: ArenaSpec,
        *,
        lock_wait_s: float,
        progress: Progress = lambda done, total: None,
    ) -> _Mapped:
        """Make, prefault and map a new arena; only the node's owner may.

        The file gets its name when it is complete, so nobody ever maps half an arena. Retire an
        earlier arena of that name first. Raises as `file.create_file`.
        """
        arena_file.create_file(directory, spec, progress)
        return cls(directory, lock_wait_s=lock_wait_s)

    @classmethod
    def attach(cls: type[_Mapped], directory: Path, *, label: str, lock_wait_s: float) -> _Mapped:
        """Map the arena in `directory` and join it; it is closed again if that fails."""
        arena = cls(directory, lock_wait_s=lock_wait_s)
        try:
            arena.join(label)
        except KVRayError:
            arena.close()
            raise
        return arena

    def close(self) -> None:
        """Leave and unmap; views that others still have keep the mapping alive. Twice is fine."""
        if "tables" in vars(self):
            self.leave()
            self._unmap()

    def __getattr__(self, name: str) -> Any:
        """Say what it means that the tables are not there any more."""
        if name == "tables":
            raise ShardUnavailable(f"This process has closed the arena in {self.directory}.")
        raise AttributeError(name)

    @property
    def retired(self) -> bool:
        """Whether the owner has given this arena up; detach and look for its successor."""
        return self.tables.state[0] != LIVE

    @property
    def is_superseded(self) -> bool:
        """Whether this arena was retired, or its file removed by hand and another made."""
        path = self.directory / ARENA_FILE
        return self.retired or arena_file.holds_arena(path, self.arena_id) is False

    def stats(self) -> dict[str, Any]:
        """Return figures for people; read without the lock, so they may be a moment apart."""
        return {"arena_id": self.arena_id, **figures(self.tables)}

    # -- the row among the holders ------------------------------------------------------------

    @property
    def holder(self) -> int:
        """This process's row in the holder table; LeaseExpired: it has not joined, or has left."""
        holder = self._holder
        if holder is None:
            raise LeaseExpired("This process is no holder of the arena; call join first.")
        return holder

    @property
    def membership(self) -> Membership:
        """This process's row, and its generation, which no later process in that row has."""
        return Membership(self.holder, int(self.tables.holder_generation[self.holder]))

    def join(self, label: str) -> int:
        """Become a holder: leases and reservations of this process end with it. Twice is fine.

        Raises:
            CapacityError: living processes take every row of the holder table.
            ShardUnavailable: the lock could not be had, or the arena is retired.
        """
        with self.section(_JOIN_WAIT_S) as entered:
            refused = not entered or self.retired
            if not refused and self._holder is None:
                self._holder = holders.enter(
                    self.tables, self.side_file, label, now=time.monotonic()
                )
                self._joined_as = None if self._holder is None else self.membership
        if refused:
            raise ShardUnavailable(self.no_entry())
        if self._holder is None:
            raise CapacityError(
                "All holder rows of the arena are taken; raise arena.holders_max and restart the"
                " tier."
            )
        return self.holder

    def stay(self) -> None:
        """Give nothing back before this process has ended: something still writes to its slots."""
        self._holder = None

    def leave(self, *, unless_leased: bool = False, wait_s: float = _JOIN_WAIT_S) -> bool:
        """Give back all that this process holds; its copies must have ended. Twice is fine.

        `wait_s` is the longest try for the lock; without it the owner gives back the rest. With
        `unless_leased` it stays if a living process has a lease here, or if the arena is busy.
        Returns whether this process is no holder now.
        """
        if self._holder is None:
            return True
        row = None
        try:
            with self.section(self.lock_wait_s if unless_leased else wait_s) as entered:
                # Asked in the section in which it leaves. A thread that leases comes before it,
                # and its lease is seen, or after it, and gets none.
                if unless_leased and (not entered or self._is_leased()):
                    return False
                # In the section, so that no other thread leases or reserves for a row that is gone.
                row, self._holder = self._holder, None
                # Without the lock, ending the liveness lock is enough: the owner buries the row.
                if entered and row is not None:
                    holders.leave(self.tables, row)
        finally:
            if row is not None:
                self.side_file.unlock(HOLDER_BYTES + row)
        return True

    def leased_slots(self, held: Lease) -> Array:
        """Return the slots of a lease, in prefix order; they have the blocks it was given for.

        Needs no lock: nothing leased changes. A changed record, key or slot shows here, before
        anybody looks at the bytes.

        Raises:
            CorruptBlock: a table was damaged, and no longer names these blocks.
            LeaseExpired: it was released.
        """
        found = lease.leased_slots(self.tables, held)
        if found is None:
            raise LeaseExpired(
                f"Lease {held.lease_id} has ended; its blocks cannot be read, and what was read of"
                " them since is void."
            )
        try:
            check = lease.check_of(key_index.words_in(self.tables, found))
        except IndexError:  # there are no such slots
            check = None
        if check != held.check or len(found) != held.num_slots:
            raise CorruptBlock(
                f"Lease {held.lease_id} does not name the blocks that it was given for: a table of"
                f" the arena in {self.directory} was damaged. Its shard repairs it; test the"
                " memory of this node."
            )
        return found

    def held_by(self, held: Lease, *, since: Membership | None = None) -> tuple[Membership, Array]:
        """Return the process that has the lease, and its slots as `leased_slots` does.

        `since` had it before a copy, and must have it still.

        Read without the lock: a record does not change while it is held. An ended lease stays
        ended, because no lease id and no generation of a row is given twice. So a process that has
        the lease before and after a copy had it all the while, and a leased block is neither
        evicted nor written. Leases of one name are alike (`lease.id_of`); their generations differ.

        Raises:
            CorruptBlock: as `leased_slots`.
            LeaseExpired: it has ended, or its holder has, or that is not `since`; nothing has kept
                its blocks.
        """
        slots = self.leased_slots(held)
        row = int(self.tables.page_holder[held.page]) - 1
        if not 0 <= row < self.tables.geometry.holders_max:
            row = -1  # it ended just now, or a table is damaged
        found = Membership(row, int(self.tables.holder_generation[row]))
        is_other = row == self._holder and found != self._joined_as
        if is_other or not lease.is_member(self.tables, found):
            raise LeaseExpired(
                f"The holder of lease {held.lease_id} has lost its place in the arena in"
                f" {self.directory}; the blocks of the lease cannot be read."
            )
        if since is not None and found != since:
            raise LeaseExpired(
                f"The holder of lease {held.lease_id} changed while its blocks were copied; they"
                " may be wrong."
            )
        return found, slots

    def _is_open(self, holder: int) -> bool:
        """Whether `holder` may take something new: another thread may have left or retired."""
        return self._holder == holder and not self.retired

    def _is_leased(self) -> bool:
        """Whether a living process has a lease here; the lock is held."""
        named = self.tables.page_holder
        rows = np.unique(named[named > 0]) - 1
        return any(self.side_file.is_locked(HOLDER_BYTES + row) for row in rows.tolist())

    # -- the lock section ---------------------------------------------------------------------

    def section(self, wait_s: float, *, may_rebuild: bool = False) -> AbstractContextManager[bool]:
        """Hold the lock; False: somebody else has it, or the owner must rebuild the tables.

        All writes inside stand when the section ends, or none does. An exception undoes them here;
        after a death the next taker of the lock does. It does so too if an exception from outside
        kept this process from undoing the step. The lock is given up in any case.

        Raises:
            ShardUnavailable: the arena was closed.
        """
        undo = self.tables.undo  # first: nothing is locked for an arena that was closed

        def opened() -> bool:
            if not undo.begin():
                return True
            # A writer died in its step. Only the owner rebuilds what cannot be undone.
            with self.making_sense:
                if not undo.roll_back():
                    if not may_rebuild:
                        return False
                    audit.rebuild(self.tables, now=time.monotonic())
                self.tables.counts.repairs += 1
            return True

        def closed(error: BaseException | None) -> None:
            if error is None:
                undo.settle()
            else:
                undo.roll_back()
                self.check_sense(error)

        return self._lock.section(wait_s, opened, closed)

    def no_entry(self) -> str:
        """Return a sentence that says why a section was not entered."""
        if self.side_file.detached:
            return "A forked process cannot use its parent's arena; start it with spawn instead."
        if self.retired:
            return f"The arena in {self.directory} is retired; open its successor."
        if self.tables.undo.is_open:
            return (
                f"The tables of the arena in {self.directory} are half changed; its shard repairs"
                " them."
            )
        return (
            f"The arena in {self.directory} stays locked, or this process may open no more files;"
            " try again."
        )

    def check_sense(self, error: BaseException) -> None:
        """Raise ShardUnavailable if damaged tables have caused `error`."""
        if _is_senseless(error):
            raise ShardUnavailable(
                f"The tables of the arena in {self.directory} make no sense ({error!r}); its shard"
                " repairs them."
            ) from error

    def _text(self, field: str) -> str:
        text: bytes = self.tables.header[field].item()
        return text.decode(errors="replace")

    def _unmap(self) -> None:
        vars(self).pop("tables", None)
        self._lock = ArenaLock(self.side_file)  # the old one has a word of the mapping


class _MakingSense:
    """Treats an error that damaged tables cause as a missing arena, by ShardUnavailable.

    Bounds are checked where a table's value becomes an index. This covers all other values: a
    flipped bit must not end a process. Each hit enters it, so it is no generator.
    """

    __slots__ = ("_arena",)

    def __init__(self, arena: MappedArena) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._arena.check_sense(error)


def is_damage(error: BaseException) -> bool:
    """Return whether damaged tables may have caused this error."""
    return _is_senseless(error) or _is_senseless(error.__cause__)


def _is_senseless(error: BaseException | None) -> bool:
    return isinstance(error, _DAMAGE) and not isinstance(error, KVRayError)


_NAMESPACES_MAX = 256
_COUNTED = ("stored", "evicted", "dropped", "corrupt", "repairs", "over_quota")


def figures(tables: Tables) -> dict[str, Any]:
    """Return the figures; read without the lock, so they may be a moment apart."""
    geometry, header = tables.geometry, tables.header
    states = tables.slot_state[tables.backed]
    ready = states == READY
    sizes = np.where(tables.slab_block_bytes > geometry.slab_bytes, 0, tables.slab_block_bytes)
    # More than fits is nonsense that the shard has not mended yet; people get numbers that can be.
    most = geometry.slab_bytes // np.maximum(sizes, geometry.slot_min)
    per_slab = np.minimum(geometry.by_slab(ready).sum(axis=(1, 2)), most)
    use = slab_use(tables)
    full = sum(one["slabs"] * (1 - one["free_slots"] / max(1, one["slots"])) for one in use)
    return {
        "shard_epoch": int(header["shard_epoch"]),
        "capacity_bytes": geometry.capacity,
        "resident_bytes": int((per_slab * sizes).sum()),
        "taken_bytes": round(full * geometry.slab_bytes),  # by slots, with what is unused in them
        "blocks": int(ready.sum()),
        "leased_blocks": int((tables.slot_leases[tables.backed] > 0).sum()),
        "quarantined_blocks": int((states == QUARANTINED).sum()),
        "holders": int(np.count_nonzero(tables.holder_live)),
        "slabs": use,
        "spare_slabs": slabs.num_spare(tables),
        "namespaces": by_namespace(tables),
        **{name: int(header[name]) for name in _COUNTED},
    }


def by_namespace(tables: Tables) -> list[dict[str, Any]]:
    """Return the blocks and bytes of the largest namespaces, in order; "" is an unknown one."""
    found = sorted(quotas.used(tables).items(), key=lambda one: -one[1][1])
    return [
        {
            "namespace": quotas.name_of(namespace) if namespace else "",
            "blocks": num_blocks,
            "bytes": num_bytes,
            "quota_bytes": quotas.quota_of(tables, namespace),
        }
        for namespace, (num_blocks, num_bytes) in found[:_NAMESPACES_MAX]
    ]


def slab_use(tables: Tables) -> list[dict[str, Any]]:
    """Return the use of the slabs of each block size, ascending; needs no lock.

    `slot_waste_bytes` lie between a block's end and its slot's, `slab_waste_bytes` after the last
    slot of a slab; no block can use them.
    """
    return [_use(tables, size) for size in slabs.block_sizes(tables)]


def _use(tables: Tables, block_bytes: int) -> dict[str, Any]:
    geometry, stride = tables.geometry, tables.geometry.stride(block_bytes)
    own = np.flatnonzero(tables.slab_block_bytes == block_bytes)
    per_slab = geometry.slab_bytes // stride
    states = slabs.states_in(tables, own, per_slab)
    free = states == FREE
    num_free, longest = int(np.count_nonzero(free)), _longest_runs(free)
    return {
        "block_bytes": block_bytes,
        "slabs": len(own),
        "slots": states.size,
        "blocks": int(np.count_nonzero(states == READY)),
        "free_slots": num_free,
        "longest_free_run": int(longest.max(initial=0)),
        "fragmented_share": 1 - int(longest.sum()) / num_free if num_free else 0.0,
        "slot_waste_bytes": states.size * (stride - block_bytes),
        "slab_waste_bytes": len(own) * (geometry.slab_bytes - per_slab * stride),
    }


def _longest_runs(free: Array) -> Array:
    num_rows, num_columns = free.shape
    # A column that is never set keeps the runs of neighbouring rows apart, and ends the last one.
    flags = np.zeros((num_rows, num_columns + 1), dtype=bool)
    flags[:, :-1] = free
    edges = np.flatnonzero(np.diff(flags.ravel(), prepend=False))
    starts, stops = edges[::2], edges[1::2]
    longest = np.zeros(num_rows, dtype=np.int64)
    np.maximum.at(longest, starts // (num_columns + 1), stops - starts)
    return longest
