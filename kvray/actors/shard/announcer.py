"""Turns changes of a node's tiers into logs, which the partitions of the lookup read.

For the lookup, a node either has a block, in memory or on disk, or it does not. A block that leaves
one tier is announced as gone only if the other tier lacks it. A block found in one tier is
announced even if the other has it too. So if two changes cross, the later look corrects them.

`TierDelta` has the changes of one tier since the last look. `ChangeLog` is what one partition is
yet to take of them, and `Announcer` answers the polls of all partitions.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvray.actors.lookup.delta import Cursor, Delta, Poll, packed_parts, shares
from kvray.errors import ShardUnavailable
from kvray.index import PARTS_MAX
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.arena.tables import Array, EventReader, Tables
from kvray.store.block_history import CORRUPT, DISK_ROOM, HOST, NVME, WRITER
from kvray.store.nvme import NvmeStore

CHANGES_MAX = 200_000
"""Changes, beside the blocks that it lists, that a log has room for; it starts over with more."""
_LEAST_S = 0.001
"""A wait that is nearly over is over: a timer of less than the clock's last digit never ends."""
_UNHEARD_S = 2.0
"""After so long without a poll, and some of its paces, a partition counts as one that is away."""


Section = Callable[[], AbstractContextManager[bool]]
"""Keeps the tables still; False: not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Blocks: keys, u64 of shape [num_blocks, 4], part and head number of each."""

    keys: Array
    parts: Array
    heads: Array
    is_corrupt: Array | None = None
    """Of blocks that have gone, a mask of those whose bytes were wrong."""

    def __len__(self) -> int:
        return len(self.parts)

    def chosen(self, mask: Array) -> "Entries":
        """Return those in `mask`."""
        return Entries(keys=self.keys[mask], parts=self.parts[mask], heads=self.heads[mask])


class TierDelta:
    """The blocks of one tier, from its tables; single-threaded."""

    def __init__(self, tables: Callable[[], Tables], section: Section) -> None:
        """Have told nothing yet: every block counts as a change.

        `tables` is asked each time, because they may be mapped memory.
        """
        self._tables = tables
        self._section = section
        self._events = EventReader()
        rows = tables().geometry.num_slots
        # What was told of each slot: part + 1, or 0 for nothing; it takes 38 bytes a slot.
        self._held = np.zeros(rows, dtype=np.uint16)
        self._keys = np.zeros((rows, 4), dtype="<u8")
        self._heads = np.zeros(rows, dtype=np.uint32)
        self.num_held = np.zeros(PARTS_MAX, dtype=np.int64)
        """Blocks that are held of each part."""

    @property
    def is_behind(self) -> bool:
        """Whether there are slots that it has never looked at, or not since it was overtaken."""
        return self._events.is_behind(self._tables())

    def collect(self) -> tuple[Entries, Entries] | None:
        """Return (removed, added) since the last look; None if nothing has changed.

        A slot may have changed more than once. The first looks go through a tier in pieces.
        """
        tables = self._tables()
        if not self._events.has_more(tables):
            return None
        with self._section() as entered:
            if not entered:
                return None
            slots = self._events.take(tables)
            ready, held = tables.slot_state.take(slots) == READY, self._held.take(slots)
            matters = ready | (held > 0)
            slots, ready, held = slots[matters], ready[matters], held[matters]
            keys, parts = tables.slot_key.take(slots, axis=0), tables.slot_part.take(slots)
            heads = tables.slot_head.take(slots)
            is_bad = tables.slot_state.take(slots) == QUARANTINED
        # One engine's absurd part must not have everything refused that the shard announces.
        ready &= parts < PARTS_MAX
        # A block that `stands_in` counted as told before this look, or that came back to its slot.
        same = ready & (held == parts + 1) & (self._keys.take(slots, axis=0) == keys).all(axis=1)
        was_held = (held > 0) & ~same
        gone = Entries(
            keys=self._keys[slots[was_held]],
            parts=held[was_held] - np.uint32(1),
            heads=self._heads[slots[was_held]],
            is_corrupt=is_bad[was_held],
        )
        is_new = ready & ~same
        come = Entries(keys=keys[is_new], parts=parts[is_new], heads=heads[is_new])
        self.num_held += np.bincount(come.parts, minlength=PARTS_MAX)
        self.num_held -= np.bincount(gone.parts, minlength=PARTS_MAX)
        self._held[slots[was_held]] = 0
        self._hold(slots[is_new], come)
        return (gone, come) if len(gone) or len(come) else None

    def held(self) -> Entries:
        """Return everything that was told and has not been removed since."""
        held = np.flatnonzero(self._held)
        parts = self._held[held] - np.uint32(1)
        return Entries(keys=self._keys[held], parts=parts, heads=self._heads[held])

    def _hold(self, slots: Array, entries: Entries) -> None:
        self._held[slots] = entries.parts + 1
        self._keys[slots], self._heads[slots] = entries.keys, entries.heads

    def stands_in(self, entries: Entries) -> Array:
        """Return a mask of the `entries` that are here now, so that their end is announced later.

        They count as told: they may be gone before the next look. Read without the lock.
        """
        tables = self._tables()
        here = np.zeros(len(entries), dtype=bool)
        for part in np.unique(entries.parts).tolist():
            rows = np.flatnonzero(entries.parts == part)
            slots = key_index.find(tables, entries.keys[rows], part)
            told_other = (self._keys[slots] != entries.keys[rows]).any(axis=1)
            told_other |= self._held[slots] != part + 1
            # The end of another block, which was told of this slot, is to be told at the next look.
            found = (slots >= 0) & (tables.slot_state[slots] == READY)
            found &= ~((self._held[slots] > 0) & told_other)
            rows, slots = rows[found], slots[found]
            self.num_held[part] += np.count_nonzero(self._held[slots] == 0)
            told = entries.chosen(rows)
            # Where one of the two was told with an unknown head, the end of it must be too.
            is_known = (self._held[slots] == 0) | (self._heads[slots] == told.heads)
            self._hold(slots, told)
            self._heads[slots[~is_known]] = 0
            here[rows] = True
        return here


class _Run(NamedTuple):
    """Changes of one kind, noted at one time."""

    at: float
    keys: Array
    parts: Array
    is_added: bool

    def cut(self, start: int, stop: int | None = None) -> "_Run":
        return self._replace(keys=self.keys[start:stop], parts=self.parts[start:stop])


class ChangeLog:
    """The numbered changes that one partition is yet to take; single-threaded.

    Invariant: while the log has a name, what a partition took of it up to a cursor, together with
    the changes after that cursor, is what the `TierDelta` have told. The next poll's cursor
    acknowledges, and only then are changes dropped; so a lost reply is repeated. A log without a
    name notes nothing: nobody has asked yet, or so much is noted that to begin again with all
    blocks costs no more. So a partition that does not ask takes no memory.
    """

    def __init__(self, held: Callable[[], Iterable[Entries]]) -> None:
        """`held` returns all blocks that the partition is to know of."""
        self.num_told = 0
        self.telling_s = 0.0
        self.untold_since: float | None = None
        """When the oldest change was noted that no reply had yet."""
        self.news = asyncio.Event()
        """Set whenever a poll may have something to reply."""
        self.heard: tuple[Poll, float] | None = None
        """The partition's last poll, and when it came or was answered."""
        self.num_polls = 0
        self.said: object = None
        """What the last reply had about the shard."""
        self._held = held
        self._name = ""
        self._runs: deque[_Run] = deque()
        self._first = self._last = self._most = 0

    def __repr__(self) -> str:
        return f"ChangeLog({self._name or 'not asked for'}, {self._first} to {self._last})"

    def start_over(self) -> None:
        """Answer the next poll with all blocks."""
        self._name = ""
        self._runs.clear()
        self._first = self._last = 0
        self.news.set()

    def note(self, entries: Entries, is_added: bool, now: float) -> None:
        """Note blocks that came or went."""
        if not len(entries):
            return
        if self.untold_since is None:
            self.untold_since = now
        if self._name:
            self._runs.append(_Run(now, entries.keys, entries.parts, is_added))
            self._last += len(entries)
            if self._last - self._first > self._most:
                self.start_over()
        self.news.set()

    def has_news(self, cursor: Cursor | None) -> bool:
        """Return whether a reply to a poll with this cursor brings anything."""
        return not self._name or cursor != (self._name, self._last)

    def delta(self, cursor: Cursor | None, most: int, now: float) -> Delta:
        """Return up to `most` changes after `cursor`, or the first of all blocks."""
        is_full = not self._acknowledge(cursor)
        if is_full:
            self._begin(now)
        taken, left = list[_Run](), None
        for run in self._runs:
            taken.append(run.cut(0, most))
            most -= len(taken[-1].parts)
            if len(taken[-1].parts) < len(run.parts):
                left = run
                break
        stop = self._first + sum(len(run.parts) for run in taken)
        if stop > self._first and self.untold_since is not None:
            self.num_told += 1
            self.telling_s += now - self.untold_since
        self.untold_since = None if left is None else left.at
        (added_keys, added_parts), (removed_keys, removed_parts) = _settled(taken)
        return Delta(
            since=cursor,
            cursor=(self._name, stop),
            is_full=is_full,
            more=left is not None,
            added_keys=added_keys,
            added_parts=added_parts,
            removed_keys=removed_keys,
            removed_parts=removed_parts,
        )

    def _acknowledge(self, cursor: Cursor | None) -> bool:
        """Drop what the partition has taken; False: the log does not go back to its cursor."""
        name, number = cursor or ("", 0)
        if not self._name or name != self._name or not self._first <= number <= self._last:
            return False
        while self._first < number:
            run = self._runs.popleft()
            taken = min(len(run.parts), number - self._first)
            if taken < len(run.parts):
                self._runs.appendleft(run.cut(taken))
            self._first += taken
        return True

    def _begin(self, now: float) -> None:
        self.start_over()
        self._name = secrets.token_hex(8)
        self._runs.extend(_Run(now, one.keys, one.parts, True) for one in self._held() if len(one))
        self._last = sum(len(run.parts) for run in self._runs)
        self._most = self._last + CHANGES_MAX


def _settled(runs: Sequence[_Run]) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Return keys and parts of what has come after all of `runs`, and of what is gone, unordered.

    Of a block that came and went the last change counts.
    """
    keys = np.concatenate([np.zeros((0, 4), dtype="<u8"), *(run.keys for run in runs)])
    parts = np.concatenate([np.zeros(0, dtype=np.uint32), *(run.parts for run in runs)])
    kinds = np.array([run.is_added for run in runs], dtype=bool)
    came = kinds.repeat([len(run.parts) for run in runs])
    if came.any() and not came.all():
        backwards = np.column_stack((keys, parts))[::-1]
        last = len(parts) - 1 - np.unique(backwards, axis=0, return_index=True)[1]
        keys, parts, came = keys[last], parts[last], came[last]
    come, gone = ((keys[kind].tobytes(), packed_parts(parts[kind])) for kind in (came, ~came))
    return come, gone


_About = tuple[tuple[tuple[str, int], ...], tuple[int, ...], bool]
"""Ranks, namespaces, and whether the node is being drained."""


class Announcer:
    """One shard's answers to the partitions of the lookup, which follow it.

    Each partition has a log of its own. So one that is slow or starts over keeps nothing from the
    others. What the shard knows of its blocks is there once, for all logs. All of it belongs to the
    shard's event loop, but for `status`.
    """

    def __init__(
        self, num_partitions: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._arena_id = ""
        self._store: NvmeStore | None = None
        # The arena's, and the disk's if there is one.
        self._deltas: list[TierDelta] = []
        self._about: _About = (), (), False
        self._logs = [ChangeLog(partial(self._held, at)) for at in range(num_partitions)]
        # Keys of partial blocks, until the next look at the tables.
        self._partial: deque[bytes] = deque(maxlen=64)

    @property
    def is_leaving(self) -> bool:
        """Whether the node is being drained."""
        return self._about[2]

    @property
    def num_shards(self) -> int:
        """Live shards of the tier, as a partition said last; 0 while none asks."""
        polls = filter(None, map(self._poll_of, self._logs))
        return max((poll.num_shards for poll in polls), default=0)

    @property
    def is_cut_off(self) -> bool:
        """Whether there were other shards when a partition asked last, and none asks any more."""
        heard = [log.heard[0].num_shards for log in self._logs if log.heard is not None]
        return not self.num_shards and max(heard, default=0) > 1

    def unheard(self) -> list[int]:
        """Return the partitions that have not asked for long; from any thread."""
        return [number for number, log in enumerate(self._logs) if self._poll_of(log) is None]

    def _poll_of(self, log: ChangeLog) -> Poll | None:
        """Return the last poll of a log's partition; None: the partition is away."""
        poll, at = log.heard or (None, 0.0)
        is_away = poll is None or self._clock() - at > _UNHEARD_S + 6 * poll.pace_s
        return None if is_away else poll

    @property
    def namespaces(self) -> frozenset[int]:
        """Those of all shards, as arenas number them; none, if the lookup has just started."""
        heard = (log.heard for log in self._logs)
        return frozenset().union(*(poll.namespaces for poll, _ in filter(None, heard)))

    def status(self) -> dict[str, Any]:
        """Return how far the lookup is behind; from any thread.

        `lag_s` is the age of the oldest change that it was not told of, `seconds` the sum of what
        those that it was told of had at that time, one for each of the `announcements` with any.
        """
        now = self._clock()
        untold = [at for log in self._logs if (at := log.untold_since) is not None]
        return {
            "lag_s": max((now - at for at in untold), default=0.0),
            "announcements": sum(log.num_told for log in self._logs),
            "seconds": sum(log.telling_s for log in self._logs),
        }

    def name(
        self, ranks: Iterable[tuple[str, int]], namespaces: Iterable[int], *, is_leaving: bool
    ) -> None:
        """Announce that these (replica, rank), and no others, are registered here.

        `namespaces` are those of blocks and engines here, as arenas number them; `is_leaving` says
        whether the node is being drained.
        """
        about = tuple(sorted(ranks)), tuple(sorted(namespaces)), is_leaving
        if about != self._about:
            self._about = about
            for log in self._logs:
                log.news.set()

    async def delta(self, poll: Poll, heartbeat_s: float) -> Delta:
        """Return the changes since the cursor, once there are any or a heartbeat is due.

        ShardUnavailable: the partition has asked again meanwhile, so nobody waits for this reply.
        """
        if poll.partition >= len(self._logs):
            raise ShardUnavailable(f"The shard knows {len(self._logs)} partitions of the lookup.")
        if not self._deltas:
            raise ShardUnavailable("The shard has not looked at its blocks yet.")
        log, loop = self._logs[poll.partition], asyncio.get_running_loop()
        log.heard = poll, self._clock()
        if poll.partial_keys:
            self._partial.append(poll.partial_keys)
        log.num_polls += 1
        number, until = log.num_polls, loop.time() + max(heartbeat_s, poll.pace_s)
        log.news.set()  # ends the wait of the poll before
        while poll.most and number == log.num_polls and (left_s := until - loop.time()) > _LEAST_S:
            if log.has_news(poll.cursor) or log.said != self._about:
                break
            log.news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(log.news.wait(), left_s)
        if number != log.num_polls:
            # Its cursor may be an older one: the log must not begin again for it.
            raise ShardUnavailable("The partition has asked again meanwhile.")
        log.heard = poll, self._clock()
        ranks, namespaces, is_leaving = log.said = self._about
        made = Delta(since=poll.cursor, cursor=poll.cursor)
        if poll.most:
            made = log.delta(poll.cursor, poll.most, self._clock())
        return replace(made, ranks=ranks, namespaces=namespaces, is_leaving=is_leaving)

    def collect(self, owner: ArenaOwner, store: NvmeStore | None = None) -> None:
        """Note the changes in both tiers."""
        self._follow(owner, store)
        while self._partial:
            parts = np.flatnonzero(self._deltas[0].num_held).tolist()
            owner.give_up(self._partial.popleft(), parts)
        for delta in self._deltas:
            changed = delta.collect()
            if changed is not None:
                gone, come = changed
                self._note_gone(owner, gone, is_disk=delta is not self._deltas[0])
                for other in self._deltas:
                    if other is not delta and len(gone):
                        gone = gone.chosen(~other.stands_in(gone))
                self._note(gone, False)
                self._note(come, True)

    def _follow(self, owner: ArenaOwner, store: NvmeStore | None) -> None:
        """Look at this arena and this store from now on, should they be others than before."""
        if owner.arena.arena_id != self._arena_id:
            self._arena_id, self._store = owner.arena.arena_id, None
            self._start_over()
            self._deltas = [TierDelta(lambda: owner.arena.tables, owner.section)]
        if store is self._store:
            return
        if self._store is not None:
            # Blocks on a failed disk cannot be read: announce everything again, without them.
            self._start_over()
        del self._deltas[1:]
        if store is not None:
            self._deltas.append(TierDelta(lambda: store.tables, store.section))
        self._store = store

    def _start_over(self) -> None:
        for log in self._logs:
            log.start_over()

    def _note_gone(self, owner: ArenaOwner, gone: Entries, *, is_disk: bool) -> None:
        """Have it remembered what has left a tier without the owner's doing."""
        tier, cause = (NVME, DISK_ROOM) if is_disk else (HOST, WRITER)
        causes = np.full(len(gone), cause)
        if gone.is_corrupt is not None:
            causes[gone.is_corrupt] = CORRUPT
        owner.history.note_rest(gone.keys[:, 0], tier, causes, now=time.time())

    def _note(self, entries: Entries, is_added: bool) -> None:
        now, masks = self._clock(), shares(entries.heads, len(self._logs))
        for log, mask in zip(self._logs, masks, strict=True):
            log.note(entries if mask is None else entries.chosen(mask), is_added, now)

    def _held(self, partition: int) -> Iterator[Entries]:
        for delta in self._deltas:
            held = delta.held()
            mask = next(islice(shares(held.heads, len(self._logs)), partition, None))
            yield held if mask is None else held.chosen(mask)
