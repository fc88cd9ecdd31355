"""Moves blocks between an arena and a store below it.

The demoter writes blocks that go next, or all of them at the end. A block is written while it is
still in the arena, so that eviction never waits for a device. Its ancestors are written too,
because without them it is never found.

The promoter brings blocks from a store's files into free slots of the arena, along a prefix. It
reads the whole rest of a prefix ahead, piece by piece from its front. The longer an engine waits,
the more of the prefix is READY, and never with a gap.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.errors import CapacityError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store.arena import key_index, slabs
from kvray.store.arena.arena import Arena
from kvray.store.arena.eviction import choose_beyond_quotas, choose_victims
from kvray.store.arena.layout import NO_SLOTS, READY
from kvray.store.arena.lease import Lease
from kvray.store.arena.payload import runs
from kvray.store.arena.slots import Reservation
from kvray.store.arena.tables import Array, Tables
from kvray.store.nvme.store import NvmeStore
from kvray.store.nvme.terms import Demotion, WriteBudget
from kvray.store.retention import Retention, find_alike

_log = logging.getLogger("kvray.nvme")

_BATCH_BYTES = 64 * 2**20
"""Bytes leased and written at once: worth a sync, and released soon."""
_BATCH_SHARE = 1 / 16
"""Most of the arena that one batch takes, because it cannot be evicted meanwhile."""
_ROOM_SHARE = 0.01
"""Share of the store's blocks of a size that goes at once when it is full."""
_LOCK_WAIT_S = 0.5
_BUSY_S = 0.001
_SAVE_S = 60.0  # how often the write budget's ledger is saved

Progress = Callable[[int, int], None]  # called with bytes done and bytes in all


Path = tuple[Array, Array]
"""Slots from a block to one of its descendants, and the number of each slot's block."""


@dataclass(slots=True)
class DemotionCounts:
    """Counts of a demoter; read from any thread."""

    demoted_blocks: int = 0
    demoted_bytes: int = 0
    refused_blocks: int = 0  # blocks that are not likely to be used again
    postponed_rounds: int = 0  # rounds in which the write budget was used up


class Demoter:
    """Demotes from `arena` to `store`; for one thread at a time, which waits for the device."""

    def __init__(
        self,
        arena: Arena,
        store: NvmeStore,
        *,
        high_watermark: float,
        budget: WriteBudget,
        retention: Retention,
    ) -> None:
        """Demote the blocks above `high_watermark`, a share of `arena` and of each quota.

        `retention` says which blocks go next from either tier, and which are worth a write.
        """
        self.counts = DemotionCounts()
        self._arena = arena
        self._store = store
        self._high_watermark = high_watermark
        capacity = arena.tables.geometry.capacity
        self._batch_bytes = min(_BATCH_BYTES, int(_BATCH_SHARE * capacity))
        self._budget = budget
        self._retention = retention
        self._unreleased: list[Lease] = []
        self._is_full_for: set[int] = set()
        self._save_at = 0.0
        # Number and last use of the block in each slot when it was written or refused: until its
        # next use there is nothing more to do.
        num_slots = arena.tables.geometry.num_slots
        self._settled_number, self._settled_tick = np.zeros((2, num_slots), dtype="<u8")

    def demote_ahead(self) -> int:
        """Write some of the blocks that go next; return how many, 0 if all is done for now.

        Raises:
            CapacityError, TierError: the device failed.
            ShardUnavailable: arena or store were closed.
        """
        self._release()
        tables, share, rank = self._arena.tables, self._high_watermark, self._retention.rank
        beyond = choose_beyond_quotas(tables, tables.num_backed, rank, share=share)
        for size in slabs.block_sizes(tables):
            if size in self._is_full_for:
                continue
            if written := self._demote(beyond[tables.block_bytes(beyond) == size], size):
                return written
            most = slabs.num_possible(tables, size)
            above = most - slabs.num_available(tables, size) - int(share * most)
            if above > 0:
                within = slabs.slots_of(tables, size)
                going = choose_victims(tables, above, within=within, rank=rank)
                if written := self._demote(going, size):
                    return written
        return 0

    def flush(self, *, until: float, progress: Progress = lambda done, total: None) -> int:
        """Write all blocks that the store does not have; return how many.

        The blocks that would go last come first. They survive a power loss when this returns. No
        batch begins after `until`, a time of `time.monotonic`. Raises as `demote_ahead`.
        """
        tables = self._arena.tables
        ready = tables.slots_in(READY)
        ready = ready[~self._is_below(ready)]
        ready = ready[np.argsort(self._retention.rank(ready), kind="stable")[::-1]]
        ends, written = np.cumsum(tables.block_bytes(ready)), 0
        # More than the store takes would drive out the first ones.
        ready = ready[: np.searchsorted(ends, self._store.geometry.capacity, side="right")]
        ends = ends[: len(ready)]
        total = int(ends[-1]) if len(ends) else 0
        progress(0, total)
        for start, stop in runs(np.diff(ends // self._batch_bytes) != 0, len(ends)):
            affordable = self._affordable(ready[start:stop])
            if time.monotonic() > until or not len(affordable):
                break
            for paths in self._by_batch(paths_to(tables, affordable, self._is_below)):
                # No later call writes a block that is left out here.
                while (now_there := self._write(paths)) is None and time.monotonic() <= until:
                    time.sleep(_BUSY_S)
                written += now_there or 0
            progress(int(ends[stop - 1]), total)
        self._store.flush(note_use=True)
        self._budget.save(self._store.directory)
        return written

    def close(self) -> None:
        """Release all leases, and save the budget. Twice is fine."""
        self._release()
        self._budget.save(self._store.directory)

    # -- choosing -----------------------------------------------------------------------------

    def _demote(self, going: Array, block_bytes: int) -> int:
        """Write the first of the blocks `going`, all of one size; return how many."""
        tables = self._arena.tables
        new = going[~self._is_settled(going)]
        below = self._is_below(new)
        self._settle(new[below])
        new = new[~below]
        admitted = self._retention.admits(new)
        refused = new[~admitted]
        self.counts.refused_blocks += len(refused)
        self._settle(refused)
        new = new[admitted][: max(1, self._batch_bytes // block_bytes)]
        affordable = self._affordable(new)
        if len(affordable) < len(new):
            self.counts.postponed_rounds += 1
        new, written = affordable, 0
        if not len(new):
            return 0
        try:
            for paths in self._by_batch(paths_to(tables, new, self._is_below)):
                now_there = self._write(paths)
                if now_there is None:
                    return written  # the rest is for the next round
                written += now_there
        except CapacityError as error:
            if self._store.geometry.stride(block_bytes) <= self._store.geometry.slab_bytes:
                raise
            _log.warning(
                "Blocks of %d bytes stay out of the NVMe tier: %s", block_bytes, str(error)
            )
            self._is_full_for.add(block_bytes)
        self._settle(new)
        return written

    def _affordable(self, chosen: Array) -> Array:
        """Return the first of `chosen` that the budget has room for; ancestors come on top."""
        now = time.time()
        self._budget.spend(0, now)  # the clock may have gone back
        room = self._budget.available(now)
        if room is None:
            return chosen
        ends = np.cumsum(self._arena.tables.block_bytes(chosen))
        return chosen[: np.searchsorted(ends, room, side="right")]

    def _is_below(self, chosen: Array) -> Array:
        is_below: Array = find_alike(self._arena.tables, chosen, self._store.tables) >= 0
        return is_below

    def _is_settled(self, chosen: Array) -> Array:
        tables = self._arena.tables
        same: Array = self._settled_number[chosen] == tables.slot_number[chosen]
        same &= self._settled_tick[chosen] == tables.slot_tick[chosen]
        return same

    def _settle(self, chosen: Array) -> None:
        self._settled_number[chosen] = self._arena.tables.slot_number[chosen]
        self._settled_tick[chosen] = self._arena.tables.slot_tick[chosen]

    # -- writing ------------------------------------------------------------------------------

    def _by_batch(self, paths: Sequence[Path]) -> Iterator[list[Path]]:
        """Yield pieces of the paths, each list as much as is written at once."""
        batch: list[Path] = []
        left = self._batch_bytes
        for path, numbers in paths:
            size = int(self._arena.tables.block_bytes(path[:1])[0])
            step = max(1, self._batch_bytes // max(1, size))
            for start in range(0, len(path), step):
                piece = slice(start, start + step)
                batch.append((path[piece], numbers[piece]))
                left -= len(path[piece]) * size
                if left <= 0:
                    yield batch
                    batch, left = [], self._batch_bytes
        if batch:
            yield batch

    def _write(self, paths: Sequence[Path]) -> int | None:
        """Write blocks that are still the same.

        Returns how many are in the store now; None if the arena was busy: try again.
        """
        tables = self._arena.tables
        held = self._arena.lease_slots(np.concatenate([path for path, _ in paths]))
        if held is None:
            return None
        try:
            # From here on a leased block stays. A path ends at the first slot that is not leased or
            # holds another block.
            leased = self._arena.leased_slots(held)
            demotions: list[Demotion] = []
            try:
                for path, numbers in paths:
                    kept = np.isin(path, leased) & (tables.slot_number[path] == numbers)
                    num_kept = len(path) if kept.all() else int(kept.argmin())
                    if num_kept:
                        demotions.append(self._reserve(path[:num_kept]))
            except BaseException:
                for one in demotions:
                    self._store.abort(one)
                raise
            masks = self._store.write(demotions, tables)
        finally:
            self._unreleased.append(held)
            self._release()
        pairs = list(zip(demotions, masks, strict=True))
        targets = [one.reservation.slots[mask] for one, mask in pairs]
        written = np.concatenate([NO_SLOTS, *(one.arena_slots[mask] for one, mask in pairs)])
        self._retention.demoted(np.concatenate([NO_SLOTS, *targets]), written)
        return self._count(written)

    def _reserve(self, path: Array) -> Demotion:
        tables = self._arena.tables
        before = int(tables.parents(path[:1])[0])
        self._make_room(path if before < 0 else np.append(path, before))
        return self._store.reserve(tables, path)

    def _make_room(self, wanted: Array) -> None:
        size = int(self._arena.tables.block_bytes(wanted[:1])[0])
        below = self._store.tables
        short = len(wanted) - slabs.num_available(below, size)
        if short <= 0:
            return
        within = slabs.slots_of(below, size)
        protect = find_alike(self._arena.tables, wanted, below)
        # To rank all of them is costly: evict more than needed at once.
        count = max(short, int(_ROOM_SHARE * len(within)))
        victims = choose_victims(
            below,
            count,
            within=within,
            protect=protect[protect >= 0],
            rank=self._retention.rank_below,
        )
        self._retention.evicted_below(self._store.evict(victims))

    def _count(self, written: Array) -> int:
        num_bytes = int(self._arena.tables.block_bytes(written).sum())
        self._budget.spend(num_bytes, time.time())
        if time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + _SAVE_S
            self._budget.save(self._store.directory)
        self.counts.demoted_blocks += len(written)
        self.counts.demoted_bytes += num_bytes
        return len(written)

    def _release(self) -> None:
        if self._unreleased and self._arena.release(*self._unreleased, wait_s=_LOCK_WAIT_S):
            self._unreleased.clear()


def paths_to(tables: Tables, slots: Array, is_below: Callable[[Array], Array]) -> list[Path]:
    """Return paths to write so that `slots` and all their ancestors are in the tier below.

    Without the lock the result may be out of date: a slot with another number has another block by
    now. `is_below` masks the slots whose blocks the tier below has. The block before a path is
    below, in an earlier path, or there is none.
    """
    number = tables.slot_number[tables.backed].copy()  # before what it says is looked at
    parent = tables.parents(tables.backed)
    wanted = np.zeros(len(parent), dtype=bool)
    level = slots
    while len(level):
        level = level[~wanted[level]]
        level = level[~is_below(level)]
        wanted[level] = True
        level = parent[level].astype(np.int64)
        level = np.unique(level[level >= 0])
    found = np.flatnonzero(wanted)
    found = found[np.argsort(tables.slot_depth[found], kind="stable")]
    # A block goes on with its parent's path, unless another child of it does already.
    paths: dict[int, list[int]] = {}
    by_end: dict[int, int] = {}
    for slot, before in zip(found.tolist(), parent[found].tolist(), strict=True):
        start = by_end.pop(before, slot)
        paths.setdefault(start, []).append(slot)
        by_end[slot] = start
    made = (np.array(path, dtype=np.int64) for path in paths.values())
    return [(path, number[path]) for path in made]


_PIECE_BYTES = 32 * 2**20
"""Bytes that are read before they become READY: enough to keep a device busy."""

Promoted = Callable[[Array, Array], None]
"""Called with slots of the arena, and the store's slots of the same blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Blocks that a promotion has made READY."""

    num_blocks: int
    num_bytes: int
    num_unreadable: int  # blocks that the store should have, and could not read


class Promoter:
    """Promotes blocks of `store` into `arena`. Thread-safe; waits for the device."""

    def __init__(self, arena: Arena, store: NvmeStore, promoted: Promoted) -> None:
        """Promote into `arena`, which this process has joined, and tell `promoted` of it."""
        self._arena = arena
        self._store = store
        self._promoted = promoted
        self._to_return: dict[int, Reservation] = {}
        """By number: slots that go back as soon as the arena's lock can be had."""
        self.num_pieces = 0
        """Reads that have ended, well or not: the count stands still if the device hangs."""

    def promote(
        self,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey | None,
        depth: int,
        part: int,
        needs_parent: bool,
        deadline: float,
    ) -> Brought:
        """Bring leading blocks of a chain here, for as long as there is time and room.

        Arguments as for `Arena.reserve`; `keys` that are here already are passed over. No piece
        begins after `deadline`, a time of `time.monotonic`. ShardUnavailable: arena or store is
        busy, retired or closed.
        """
        packed = key_index.pack_keys(keys)
        found, sizes = self._store.find(packed, part)
        tables = self._store.tables
        num_blocks = num_bytes = num_unreadable = 0
        for start, stop in _pieces(sizes):
            if time.monotonic() > deadline:
                break
            size = int(sizes[start])
            made = self._arena.reserve(
                keys[start:stop],
                parent=keys[start - 1] if start else parent,
                depth=depth + start,
                part=part,
                block_bytes=size,
                needs_parent=needs_parent or start > 0,
                wait_s=_LOCK_WAIT_S,
                namespace=int(tables.slot_namespace[found[start]]),
                priority=tables.slot_priority[found[start:stop]],
                head=int(tables.slot_head[found[start]]),
            )
            if made is None:
                raise ShardUnavailable("The arena of this node is busy or retired.")
            num_good = self._fill(made, packed[start:stop], found[start:stop], part)
            num_unreadable += len(made.slots) - num_good
            num_blocks += num_good
            num_bytes += num_good * size
            if made.dropped or num_good < len(made.slots):
                break
        return Brought(num_blocks=num_blocks, num_bytes=num_bytes, num_unreadable=num_unreadable)

    def _fill(self, made: Reservation, keys: Array, found: Array, part: int) -> int:
        """Read blocks, which the store has in `found`; return how many are READY now."""
        try:
            valid, sums = self._store.read(keys[made.rows], part, self._arena.tables, made.slots)
            good = made.only(valid)
            if not self._arena.commit(good, sums[valid]):
                raise ShardUnavailable("The arena of this node stays locked; blocks are given up.")
        finally:
            self.num_pieces += 1
            # A slot that is READY by now has left the reservation.
            self._to_return[made.number] = made
            for one in tuple(self._to_return.values()):
                if not self._arena.abort(one):
                    break
                self._to_return.pop(one.number, None)
        self._promoted(good.slots, found[made.rows][valid])
        return len(good.slots)


def _pieces(sizes: Array) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of leading blocks that are there, of one size and not too many bytes."""
    missing = np.flatnonzero(sizes == 0)
    sizes = sizes[: missing[0]] if len(missing) else sizes
    for first, last in runs(np.diff(sizes) != 0, len(sizes)):
        step = max(1, _PIECE_BYTES // int(sizes[first]))
        for start in range(first, last, step):
            yield start, min(start + step, last)
