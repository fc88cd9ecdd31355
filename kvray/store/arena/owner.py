"""The owner's part in an arena: adopt it, keep it in order, tell what changed, end it.

Room is made ahead of need, so that writers mostly find FREE slots. The owner evicts the blocks of
each size that were chosen to go next, and chooses more when they run out. So a round costs what it
evicts; the search among all blocks comes once for an eighth of them. A size whose own blocks are
younger than a whole slab of another size gets that slab.

A file in an arena's place can be ended even if this code cannot map it.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvray.errors import ShardUnavailable
from kvray.store import block_history as gone
from kvray.store.arena import audit, eviction, holders, key_index, slabs, slots, victims
from kvray.store.arena import file as arena_file
from kvray.store.arena.arena import Arena
from kvray.store.arena.eviction import Rank
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.layout import LIMBO, MAGIC, NO_SLOTS, READY, RETIRED
from kvray.store.arena.quotas import excess, set_quotas
from kvray.store.arena.tables import Array, Tables
from kvray.store.block_history import BlockHistory

_PATIENT_S = 5.0
"""How long a command that a person waits for tries for the lock."""

EVICT_BATCH = 256
"""Blocks that one section evicts: the lock is kept for a moment only."""

_DEMAND_ROUNDS = 2
"""So many times what writers took since the last round is kept free, up to a share of the arena."""
_DEMAND_SHARE = 16

_SLABS_MAX = 8
"""Slabs of other sizes that one round clears for a size."""

_LONG_LOOK_S = 0.02
_PAUSE_SHARE = 1.0
"""A search for the blocks that go next that takes long is followed by a pause, as long again. It is
CPU time that counts: writers must find room also where the search had to wait for a core."""

_QUOTA_STEP = 4096
"""Most blocks that go at a time because of quotas; a new quota may concern many."""


class ArenaOwner:
    """An arena in the hands of its owner, which has the directory's owner lock.

    A method that finds the arena locked for `lock_wait_s` leaves its work for the next call, unless
    it says otherwise.
    """

    def __init__(self, arena: Arena, quotas: Mapping[str, int] | None = None) -> None:
        """Own `arena` with `quotas`; `adopt` it first if it may have had another owner."""
        self.arena = arena
        self.history = BlockHistory()
        """Of blocks that have left the arena, or the disk below it."""
        self._quotas = quotas or {}
        self._audited = 0
        self._within_at = -1
        """Count of changes when no namespace was over its quota."""
        self._room = RoomAhead(self)

    def adopt(self) -> int:
        """Fence off the last owner, set the quotas; return the new shard_epoch.

        To take the lock ends a step that somebody died in. What a flipped bit did is left to
        `audit`: engines go on meanwhile, as they did without an owner.

        Raises ConfigError for quotas that cannot be kept, ShardUnavailable without the lock.
        """
        with self.section() as entered:
            if entered:
                set_quotas(self._tables, self._quotas)
                self._tables.counts.shard_epoch += 1
                return int(self._tables.counts.shard_epoch)
        raise ShardUnavailable(self.arena.no_entry())

    @property
    def is_audited(self) -> bool:
        """Whether `audit` has been through all tables once."""
        return self._audited >= len(audit.shares(self._tables))

    def audit(self) -> dict[str, int]:
        """Check the next share of the tables; rebuild all of them if some are wrong.

        A cycle of calls so repairs what a flipped bit did. Returns what was wrong (`audit.find`) ->
        in how many rows.
        """
        tables, shares = self._tables, audit.shares(self._tables)
        share = shares[self._audited % len(shares)]
        self._audited += 1
        found = audit.lasting(tables, share)
        # A step that seems begun may have died, or never was one: to take the lock ends it.
        if not found and not tables.undo.is_open:
            return {}
        with self.section() as entered:
            found = audit.both(found, audit.find(tables, share)) if entered else {}
            if found:
                self._rebuild()
        return {name: len(rows) for name, rows in found.items()}

    def mend(self) -> bool:
        """Rebuild tables that made no sense; False if the arena is busy."""
        with self.section(_PATIENT_S) as entered:
            if entered:
                self._rebuild()
            return entered

    def bury_dead(self, *, limbo_s: float) -> list[str]:
        """End what dead holders held; return their labels."""
        tables, side_file = self._tables, self.arena.side_file
        is_none_given_up = (tables.slot_state[tables.backed] < LIMBO).all()
        if is_none_given_up and not holders.dead_rows(tables, side_file):
            return []
        with self.section() as entered:
            if not entered:
                return []
            now = time.monotonic()
            # Looked for again: a living process may have got a dead one's row meanwhile.
            labels = []
            for row in holders.dead_rows(tables, side_file):
                labels.append(holders.bury(tables, row, now=now))
                tables.undo.settle()  # one by one, however many have died
            slots.reclaim(tables, before=now - limbo_s)
        return labels

    def evict_ahead(self, free_target: float, rank: Rank | None = None) -> int:
        """Evict what is over quotas, and more until `free_target` of each size's slots is free.

        More than that where writers have taken more since the last time. Chooses those that go
        after these too, for writers and for the next time. `rank` is as for
        `eviction.choose_victims`. Returns how many blocks went; some may be left for the next time.
        """
        evicted = self._evict_beyond_quotas(rank)
        for size in slabs.block_sizes(self._tables):
            evicted += self._room.make(size, free_target, rank)
        return evicted

    def add_rows(self) -> int:
        """Give memory to the slot rows that writers have asked for; return how many they are.

        It takes a second for each 2 GiB of tables. Engines go on meanwhile, but blocks of the size
        that needs them are not stored. CapacityError: there is no memory for them.
        """
        tables, num_rows = self._tables, self._tables.num_backed
        wanted = min(tables.counts.wanted_rows, tables.geometry.num_slots)
        wanted -= wanted % tables.geometry.rows_for(1)
        if wanted <= num_rows:
            return 0
        path = self.arena.directory / ARENA_FILE
        arena_file.give_rows_memory(path, tables, range(num_rows, wanted))
        with self.section() as entered:
            if entered:
                tables.counts.missing_rows = tables.geometry.num_slots - wanted
        return wanted - num_rows if entered else 0

    def give_up(self, keys: bytes, parts: Iterable[int]) -> int:
        """Have useless blocks evicted before all others.

        They stay READY until then, and a use makes one as good as any other again. A block whose
        children are in use stays as long as they do. `keys` are 32 bytes each, end to end, and
        `parts` those of them to give up. Returns how many go first: those here that nobody leases;
        0 if the arena was busy, since this is only advice.
        """
        tables, packed = self._tables, np.frombuffer(keys, "<u8").reshape(-1, 4)
        # The search is done outside: the lock is kept for a moment only.
        places = [key_index.find(tables, packed, part) for part in parts] if keys else []
        if not places:
            return 0
        found, packed = np.concatenate(places), np.tile(packed, (len(places), 1))
        found, packed = found[found >= 0], packed[found >= 0]
        with self.section() as entered:
            if not entered:
                return 0
            same = (tables.slot_key.take(found, axis=0) == packed).all(axis=1)
            same &= (tables.slot_state.take(found) == READY) & (tables.slot_leases.take(found) == 0)
            tables.slot_tick[found[same]] = 0
            return int(np.count_nonzero(same))

    def clear(self) -> int:
        """Evict every block that nobody leases; return how many. ShardUnavailable: no lock.

        What is stored meanwhile stays: where engines go on it would never end.
        """
        tables, cleared = self._tables, 0
        began = tables.counts.tick
        while True:
            # The search among all slots is done outside: the lock is kept for a moment only.
            here = np.flatnonzero(tables.slot_number[tables.backed] <= began)
            found = eviction.choose_victims(tables, len(here), within=here)
            before = cleared
            for start in range(0, len(found), EVICT_BATCH):
                batch = found[start : start + EVICT_BATCH]
                causes = np.full(len(batch), gone.CLEARED)
                went = self._evict_found(batch, causes, wait_s=_PATIENT_S)
                if went is None:
                    raise ShardUnavailable(self.arena.no_entry())
                cleared += went
            if cleared == before:
                return cleared

    def evict_in_batches(self, found: Array, *, tick: int, beyond_quota: bool = False) -> int:
        """Evict what of `found` still can go, until the arena is busy; return how many went.

        They were chosen when the arena's logical time was `tick`: one used since stays, and so does
        one that was stored since in the place of one that was chosen.
        """
        evicted = 0
        # Each can go if all before it have. The lock is kept for a batch at a time.
        for start in range(0, len(found), EVICT_BATCH):
            batch = found[start : start + EVICT_BATCH]
            causes = np.full(len(batch), gone.QUOTA) if beyond_quota else self._ahead(batch)
            went = self._evict_found(batch, causes, tick=tick, wait_s=self.arena.lock_wait_s)
            if went is None:
                break
            evicted += went
        return evicted

    def let_go_ahead(self, going: Array) -> None:
        """Evict `going`, which can go for sure, ahead of need; in a section."""
        self._let_go(going, self._ahead(going))

    def section(self, wait_s: float | None = None) -> AbstractContextManager[bool]:
        """Hold the arena's lock; False: not now. It derives tables that a death left half done."""
        wait_s = self.arena.lock_wait_s if wait_s is None else wait_s
        return self.arena.section(wait_s, may_rebuild=True)

    def retire(self) -> None:
        """End the arena: its holders detach; the file and its side file are unlinked."""
        self._tables.state[0] = RETIRED
        path = self.arena.directory / ARENA_FILE
        # The name may be the successor's already.
        if arena_file.holds_arena(path, self.arena.arena_id):
            path.unlink(missing_ok=True)
        self.arena.side_file.path.unlink(missing_ok=True)

    @property
    def _tables(self) -> Tables:
        return self.arena.tables

    def _rebuild(self) -> None:
        audit.rebuild(self._tables, now=time.monotonic())
        set_quotas(self._tables, self._quotas)
        self._tables.counts.repairs += 1

    def _evict_beyond_quotas(self, rank: Rank | None) -> int:
        tables = self._tables
        changes = tables.counts.changes
        if changes == self._within_at:
            return 0
        if not excess(tables):
            self._within_at = changes
            return 0
        tick = tables.counts.tick
        found = eviction.choose_beyond_quotas(tables, _QUOTA_STEP, rank)
        return self.evict_in_batches(found, tick=tick, beyond_quota=True)

    def _ahead(self, going: Array) -> Array:
        """Return why each of `going` goes ahead of need."""
        given_up = self._tables.slot_tick[going] == 0
        return np.where(given_up, gone.GIVEN_UP, gone.AHEAD)

    def _evict_found(
        self, found: Array, causes: Array, *, wait_s: float, tick: int | None = None
    ) -> int | None:
        """Evict what of `found` still can go, each for its cause; None if the arena was busy."""
        tables = self._tables
        with self.section(wait_s) as entered:
            if not entered:
                return None
            if tick is not None:
                as_chosen = tables.slot_tick.take(found) <= tick
                found, causes = found[as_chosen], causes[as_chosen]
            going = eviction.keep_evictable(tables, found)
            order = np.argsort(found)
            self._let_go(going, causes[order[np.searchsorted(found, going, sorter=order)]])
            return len(going)

    def _let_go(self, going: Array, causes: Array) -> None:
        """Evict `going`, each for its cause; the lock is held."""
        tables = self._tables
        slots.evict(tables, going)
        tables.counts.over_quota += int(np.count_nonzero(causes == gone.QUOTA))
        # In the same section, so that nobody finds them gone before the history says why.
        self.history.note(tables.slot_key[going, 0], gone.HOST, causes, now=time.time())


@dataclass(slots=True, kw_only=True)
class _Size:
    """What is known of a block size since the last round."""

    left: int = 0
    """Blocks that there was room for."""
    changes: int = -1
    """The arena's count of changes when the last search began."""
    search_at: float = 0.0
    """Time of `time.monotonic` before which there is no other."""


class RoomAhead:
    """Makes room for each block size; single-threaded."""

    def __init__(self, owner: ArenaOwner) -> None:
        self._owner = owner
        self._sizes: dict[int, _Size] = {}

    def make(self, block_bytes: int, free_target: float, rank: Rank | None) -> int:
        """Evict until a share of the size's slots is free; return how many blocks went.

        Where writers take more than that share in two rounds, what they take is kept free.
        """
        tables = self._owner.arena.tables
        size = self._sizes.setdefault(block_bytes, _Size())
        taken = max(0, size.left - slabs.num_available(tables, block_bytes))
        most = tables.geometry.num_slabs * slabs.usable(tables, block_bytes) // _DEMAND_SHARE
        demand = min(_DEMAND_ROUNDS * taken, most)
        evicted = 0
        if self._shortfall(block_bytes, free_target, demand) and len(slabs.block_sizes(tables)) > 1:
            is_chosen = victims.num_left(tables, block_bytes) > 0
            if not is_chosen and time.monotonic() >= size.search_at:
                self._search(block_bytes, size, 0, rank)
                is_chosen = True
            if is_chosen:
                evicted = self._clear_older(block_bytes, free_target, demand)
        short = self._shortfall(block_bytes, free_target, demand)
        went = self._evict_queued(block_bytes, short)
        if self._is_search_due(block_bytes, size, is_short=went < short):
            went += self._search(block_bytes, size, max(0, short - went), rank)
        size.left = slabs.num_available(tables, block_bytes)
        return evicted + went

    def _shortfall(self, block_bytes: int, free_target: float, demand: int) -> int:
        tables = self._owner.arena.tables
        short = slabs.shortfall(tables, block_bytes, free_target)
        return max(short, demand - slabs.num_available(tables, block_bytes))

    def _clear_older(self, block_bytes: int, free_target: float, demand: int) -> int:
        """Clear slabs of other sizes that were used before the next victim of this one, if any."""
        tables, evicted = self._owner.arena.tables, 0
        for _ in range(_SLABS_MAX):
            next_victim = victims.head(tables, block_bytes)
            among = victims.next_slabs(tables, block_bytes)[:1]
            tick, last = tables.counts.tick, slabs.coldest_first(tables, among)
            if not len(last):
                break
            if next_victim is not None and last[0, 1] >= slabs.use_order(tables, next_victim)[0]:
                break
            found = slabs.choose_to_clear(tables, 1, among=among, protect=NO_SLOTS)
            went = self._owner.evict_in_batches(found, tick=tick) if len(found) else 0
            with self._owner.section() as entered:
                if entered:
                    victims.pass_slabs(tables, at_least=1)
            evicted += went
            if not self._shortfall(block_bytes, free_target, demand):
                break
        return evicted

    def _evict_queued(self, block_bytes: int, count: int) -> int:
        """Evict up to `count` blocks of those chosen ahead; return how many went."""
        evicted = 0
        while evicted < count:
            num = min(EVICT_BATCH, count - evicted)
            with self._owner.section() as entered:
                going = victims.take(self._owner.arena.tables, block_bytes, num if entered else 0)
                self._owner.let_go_ahead(going)
            evicted += len(going)
            if len(going) < num:
                break
        return evicted

    def _is_search_due(self, block_bytes: int, size: _Size, *, is_short: bool) -> bool:
        """Whether to search among all blocks of a size for those that go next."""
        if time.monotonic() < size.search_at:
            return False
        tables = self._owner.arena.tables
        most = victims.most(tables, block_bytes)
        is_near = slabs.num_available(tables, block_bytes) <= most
        is_low = 2 * victims.num_left(tables, block_bytes) < most
        return is_short or (is_near and is_low and tables.counts.changes != size.changes)

    def _search(self, block_bytes: int, size: _Size, short: int, rank: Rank | None) -> int:
        """Choose the blocks of a size that go next, and evict the first `short` of them."""
        tables, began = self._owner.arena.tables, time.thread_time()
        tick, size.changes = tables.counts.tick, tables.counts.changes
        count = short + victims.most(tables, block_bytes)
        within = slabs.slots_of(tables, block_bytes)
        found = eviction.choose_victims(tables, count, within=within, rank=rank)
        evicted = self._owner.evict_in_batches(found[:short], tick=tick)
        to_clear = slabs.coldest_first(tables, slabs.serving(tables))[:, 0]
        with self._owner.section() as entered:
            if entered:
                victims.put(tables, block_bytes, found[short:], tick=tick)
                victims.put_slabs(tables, to_clear)
        took_s = time.thread_time() - began
        pause = _PAUSE_SHARE * took_s if took_s > _LONG_LOOK_S else 0
        size.search_at = time.monotonic() + pause
        return evicted


STATE_BYTES = slice(12, 16)
"""Place of an arena's state in the file, in every version of the format."""


def retire_file(path: Path) -> None:
    """Have the processes that map the arena at `path` leave it, then unlink it.

    An arena of any format, even with a torn header behind the magic, is marked RETIRED, and those
    who map it look for its successor. Their mappings stay: the file is never truncated. Any other
    file is only unlinked. OSError: it cannot be unlinked; it is a directory, for example.
    """
    with contextlib.suppress(OSError, ValueError):
        # Follows no link, and does not wait at a FIFO.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # Mapped, because hugetlbfs knows no write.
            with mmap.mmap(fd, 0) as mapping:
                if mapping[: len(MAGIC)] == MAGIC and len(mapping) >= STATE_BYTES.stop:
                    mapping[STATE_BYTES] = RETIRED.to_bytes(4, "little")
        finally:
            os.close(fd)
    path.unlink(missing_ok=True)
