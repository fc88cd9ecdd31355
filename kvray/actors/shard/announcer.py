"""Turns changes of a node's tiers into announcements, a stream of them for each partition.

For the lookup, a node either has a block, in memory or on disk, or it does not. A block that leaves
one tier is announced as gone only if the other tier lacks it. A block found in one tier is
announced even if the other has it too. So if two changes cross, the later look corrects them.

`TierDelta` has the changes of one tier since the lookup was told. `LookupStream` is what one shard
tells one partition: announcements, in unbroken order.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from kvray.actors.lookup.lookup import Announcement, Answer, packed_parts
from kvray.actors.lookup.partitions import shares
from kvray.errors import KVRayError, ShardUnavailable
from kvray.index import PARTS_MAX
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.arena.tables import Array, EventReader, Tables
from kvray.store.block_history import CORRUPT, DISK_ROOM, HOST, NVME, WRITER
from kvray.store.nvme import NvmeStore

_log = logging.getLogger("kvray.shard")

Announce = Callable[[Announcement], Answer | None]
"""Brings an announcement to a partition and returns the answer; None if that is still to come.

It waits for nothing. Called again with the same announcement, it looks for the answer again. Raises
KVRayError once there will be none.
"""

ANNOUNCED_MAX = 20_000  # keys in one announcement; the rest follows in the next
_LEAST_MAX = 128
_PIECE_S = 0.01
"""How long the lookup may work on one announcement: from others it has queries meanwhile."""
_FIRST_MAX = 500
"""Keys with which a full announcement begins: it may be told to wait, and to send it is cheap."""
_UNHEARD_S = 2.0
"""After so long a wait for an answer the lookup counts as one that does not answer."""
_PATIENCE_S = 30.0
"""How long an answer is waited for; the lookup takes nothing that is older. After each that did not
come it is twice as long: else a lookup that is slow enough would never get to anything in time."""
_PATIENCE_MAX_S = 480.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 4.0


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


_Ranks = tuple[list[tuple[str, int]], tuple[int, ...]]
"""(replica, rank) of those that are registered, and the namespaces that are here."""


class LookupStream:
    """One shard's announcements to one partition; no two methods run at once, but for `lag_s`.

    At most one announcement is under way. So the lookup works on one piece of each shard, and a
    late answer counts like any other. A shard repeats an announcement only if the lookup has lost
    it, or refuses it.
    """

    def __init__(
        self,
        shard: str,
        announce: Announce,
        held: Callable[[], Iterable[Entries]],
        *,
        what: str = "the lookup",
        names_ranks: bool = False,
        random: Random,
    ) -> None:
        """`held` returns all blocks for a full announcement.

        One partition `names_ranks`: only it is told of them and of namespaces.
        """
        self.num_shards = 0
        """Live shards of the tier, as this partition said last; 0 while it does not answer."""
        self.num_told = 0
        self.telling_s = 0.0
        self.is_leaving = False
        """Whether to say that the node is to go."""
        self.answers: list[Answer] = []
        """Those that nobody has read yet."""
        self._shard = shard
        self._announce = announce
        self._held = held
        self._what = what
        self._random = random
        self._arena_id = ""
        # (keys, parts, whether they were added); the lookup has all that came before.
        self._pending: deque[tuple[Any, Any, bool]] = deque()
        self._untold_since: float | None = None
        self._sequence = 0
        self._ranks: _Ranks | None = ([], ()) if names_ranks else None
        self._ranks_said: _Ranks | None = None
        self._lookup_epoch: str | None = None
        self._is_heard = True
        # An announcement whose answer is still to come, since when, and whether it is outdated.
        self._under_way: Announcement | None = None
        self._sent_at = 0.0
        self._is_outdated = False
        self._patience_s = _PATIENCE_S
        # Not before then; and whether the lookup hands out turns, and has to be asked for one.
        self._send_at = 0.0
        self._has_to_ask = False
        self._num_failures = 0
        # A repeated announcement still owes the lookup its end.
        self._owes_end = False
        self._keys_max = ANNOUNCED_MAX
        # An epoch of the lookup, and by how much its clock is ahead.
        self._lookup_clock: tuple[str, float] | None = None

    def lag_s(self, now: float) -> float:
        """Return the age of the oldest change that it was not told of; from any thread."""
        since = self._untold_since
        return 0.0 if since is None else now - since

    def start_over(self, arena_id: str) -> None:
        """Announce everything again, of the arena of that name."""
        self._arena_id, self._lookup_epoch, self._is_outdated = arena_id, None, True

    def name_ranks(self, ranks: list[tuple[str, int]], namespaces: tuple[int, ...]) -> None:
        """Have these ranks announced, each (replica, rank), and these namespaces."""
        self._ranks = ranks, namespaces

    def note(self, entries: Entries, added: bool) -> None:
        """Note blocks that came or went."""
        if not len(entries):
            return
        if self._untold_since is None:
            self._untold_since = time.monotonic()
        self._pending.append((entries.keys, entries.parts, added))

    @property
    def is_telling(self) -> bool:
        """Whether an answer is soon to come."""
        return self._under_way is not None and self._is_heard

    @property
    def is_eager(self) -> bool:
        """Whether to announce at once what there is; else the next heartbeat is early enough.

        While a partition does not answer, it is.
        """
        is_new = bool(self._pending) or self._owes_end or self._ranks != self._ranks_said
        may_send = self._is_heard and self._under_way is None and time.monotonic() >= self._send_at
        return may_send and (is_new or self._lookup_epoch is None)

    def send(self, shard_epoch: int) -> None:
        """Announce what was noted, or just a heartbeat; what fails is sent again later."""
        if self._under_way is None:
            if time.monotonic() < self._send_at:
                return
            # Never a number twice: one that seems lost may still arrive.
            self._sequence += 1
            self._is_outdated = False
            self._under_way = self._next(shard_epoch, full=self._lookup_epoch is None)
            self._sent_at = time.monotonic()
        self.hear()

    def hear(self) -> None:
        """Take the answer to what is under way, if it is there."""
        if self._under_way is None:
            return
        try:
            answer = self._announce(self._under_way)
            waited_s = time.monotonic() - self._sent_at
            if answer is None and waited_s > self._patience_s:
                patience_s = self._patience_s
                self._patience_s = min(2 * patience_s, _PATIENCE_MAX_S)
                raise ShardUnavailable(f"No answer within {patience_s:.0f} s; see `kvray status`.")
        except KVRayError as error:
            self._give_up(error)
            return
        if answer is None:
            if waited_s > _UNHEARD_S:
                self._note_unheard("it has not answered yet")
            return
        announcement, self._under_way = self._under_way, None
        self._take(announcement, answer)

    def _take(self, announcement: Announcement, answer: Answer) -> None:
        if not self._is_heard:
            _log.info("%s: %s answers again", self._shard, self._what)
        now = time.monotonic()
        self._is_heard, self._num_failures, self.num_shards = True, 0, answer.num_shards
        self._patience_s = _PATIENCE_S
        self._lookup_clock = answer.lookup_epoch, answer.now_s - now
        if answer.resync:
            self._lookup_epoch = None
            self._has_to_ask = answer.wait_s > 0
            self._send_at = now + answer.wait_s * self._random.uniform(0.75, 1.25)
            return
        full = announcement.full
        same = not self._is_outdated and (full or answer.lookup_epoch == self._lookup_epoch)
        self._lookup_epoch = answer.lookup_epoch if same else None
        if full and self._has_to_ask:
            # Only the turn was asked for, and here it is.
            self._has_to_ask = False
            self._note_all()
        self._owes_end = announcement.more
        self._fit_to(announcement, answer.took_s)
        self._note_told()
        self.answers.append(answer)
        if not self._pending and not self._owes_end:
            self._send_at = now + answer.pause_s * self._random.uniform(0.75, 1.25)
        if announcement.ranks is not None:
            self._ranks_said = announcement.ranks, announcement.namespaces

    def _give_up(self, error: KVRayError) -> None:
        """Announce everything again after a while: the last announcement may be lost."""
        self._note_unheard(str(error))
        self._under_way = self._lookup_epoch = None
        self._pending.clear()
        self._num_failures += 1
        if self._num_failures > 1:
            backoff_s = min(_BACKOFF_S * 2 ** min(self._num_failures - 2, 8), _BACKOFF_MAX_S)
            self._send_at = time.monotonic() + backoff_s * self._random.uniform(0.5, 1)

    def _note_unheard(self, why: str) -> None:
        if self._is_heard:
            _log.warning("%s: %s cannot be told: %s", self._shard, self._what, why)
        self._is_heard = False
        self.num_shards = 0

    def _fit_to(self, announcement: Announcement, took_s: float) -> None:
        """Have the next pieces be as large as the lookup takes in a moment."""
        num_keys = announcement.num_entries
        if took_s > _PIECE_S:
            fitting = max(_LEAST_MAX, int(num_keys * _PIECE_S / took_s))
            self._keys_max = min(self._keys_max, fitting)
        elif took_s < _PIECE_S / 2 and num_keys >= self._keys_max:
            self._keys_max *= 4

    def _note_all(self) -> None:
        self._pending.clear()
        for entries in self._held():
            self.note(entries, True)

    def _note_told(self) -> None:
        """The lookup has taken an announcement; the remaining changes are no older."""
        if self._untold_since is not None:
            self.num_told += 1
            self.telling_s += time.monotonic() - self._untold_since
            if not self._pending:
                self._untold_since = None

    def _next(self, shard_epoch: int, *, full: bool) -> Announcement:
        if full:
            self._keys_max = _FIRST_MAX  # the first piece shows how long a key takes
            if not self._has_to_ask:
                self._note_all()
            else:
                self._pending.clear()
        is_question, room = full and self._has_to_ask, min(self._keys_max, ANNOUNCED_MAX)
        keys_of: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
        parts_of: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
        while self._pending and room:
            keys, parts, added = self._pending[0]
            # Removals are applied first: an addition must not be overtaken by an older removal.
            if not added and parts_of[True]:
                break
            if len(keys) > room:
                self._pending[0] = keys[room:], parts[room:], added
            else:
                self._pending.popleft()
            keys_of[added].extend(keys[:room].tobytes())
            parts_of[added].extend(packed_parts(parts[:room]))
            room -= min(room, len(keys))
        says_ranks = self._ranks is not None and (full or self._ranks != self._ranks_said)
        ranks, namespaces = self._ranks if self._ranks and says_ranks else (None, ())
        return Announcement(
            shard=self._shard,
            arena_id=self._arena_id,
            shard_epoch=shard_epoch,
            sequence=self._sequence,
            full=full,
            added_keys=bytes(keys_of[True]),
            added_parts=bytes(parts_of[True]),
            removed_keys=bytes(keys_of[False]),
            removed_parts=bytes(parts_of[False]),
            more=is_question or bool(self._pending),
            ranks=ranks,
            namespaces=namespaces,
            is_leaving=self.is_leaving,
            until=self._deadline(),
        )

    def _deadline(self) -> tuple[str, float] | None:
        """Return when this shard gives up on what it announces now, by the lookup's clock."""
        if self._lookup_clock is None:
            return None
        epoch, ahead_s = self._lookup_clock
        return epoch, time.monotonic() + ahead_s + self._patience_s


class Announcer:
    """One shard's announcements; `collect` and `send` are called one after the other.

    Each partition is told by a stream of its own. So one that is slow or starts over keeps nothing
    from the others. What the shard knows of its blocks is there once, for all streams.
    """

    def __init__(self, shard: str, *lookups: Announce) -> None:
        """`lookups` bring announcements to the partitions, in their order."""
        self.namespaces: frozenset[int] = frozenset()
        """Those of all shards, as arenas number them; none, if the lookup has just started."""
        self._arena_id = ""
        self._store: NvmeStore | None = None
        # The arena's, and the disk's if there is one.
        self._deltas: list[TierDelta] = []
        # Its own numbers: shards that start together must not send together.
        random = Random(shard)
        self._streams = [
            LookupStream(
                shard,
                announce,
                partial(self._held, partition),
                what=f"partition {partition} of the lookup" if partition else "the lookup",
                names_ranks=not partition,
                random=random,
            )
            for partition, announce in enumerate(lookups)
        ]

    @property
    def num_shards(self) -> int:
        """Live shards of the tier, as a partition said last; 0 while none answers."""
        return max(stream.num_shards for stream in self._streams)

    @property
    def is_telling(self) -> bool:
        """Whether the answer of a partition is soon to come."""
        return any(stream.is_telling for stream in self._streams)

    def status(self) -> dict[str, Any]:
        """Return how far the lookup is behind; from any thread.

        `lag_s` is the age of the oldest change that it was not told of, `seconds` the sum of what
        those that it was told of had at that time, one for each of the `announcements` with any.
        """
        now = time.monotonic()
        return {
            "lag_s": max(stream.lag_s(now) for stream in self._streams),
            "announcements": sum(stream.num_told for stream in self._streams),
            "seconds": sum(stream.telling_s for stream in self._streams),
        }

    def name_ranks(self, ranks: Iterable[tuple[str, int]], namespaces: Iterable[int]) -> None:
        """Announce that these (replica, rank), and no others, are registered here.

        `namespaces` are those of blocks and engines here, as arenas number them.
        """
        self._streams[0].name_ranks(sorted(ranks), tuple(sorted(namespaces)))

    @property
    def is_leaving(self) -> bool:
        """Whether the node is to go."""
        return any(stream.is_leaving for stream in self._streams)

    def name_leaving(self, is_leaving: bool) -> None:
        """Have it said, with the next heartbeat, whether the node is to go."""
        for stream in self._streams:
            stream.is_leaving = is_leaving

    def collect(self, owner: ArenaOwner, store: NvmeStore | None = None) -> bool:
        """Take answers and note changes in both tiers; return whether to announce any at once."""
        self._follow(owner, store)
        for stream in self._streams:
            stream.hear()
            self._read(stream, owner)
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
        return any(stream.is_eager for stream in self._streams)

    def send(self, shard_epoch: int, *, is_due: bool = True) -> None:
        """Announce to each partition what was noted for it, or a heartbeat if one `is_due`."""
        for stream in self._streams:
            if is_due or stream.is_eager:
                stream.send(shard_epoch)

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
        for stream in self._streams:
            stream.start_over(self._arena_id)

    def _read(self, stream: LookupStream, owner: ArenaOwner) -> None:
        answers, stream.answers = stream.answers, []
        for answer in answers:
            if stream is self._streams[0]:
                self.namespaces = frozenset(answer.namespaces)
            parts = np.flatnonzero(self._deltas[0].num_held).tolist()
            owner.give_up(answer.partial_keys, parts)

    def _note_gone(self, owner: ArenaOwner, gone: Entries, *, is_disk: bool) -> None:
        """Have it remembered what has left a tier without the owner's doing."""
        tier, cause = (NVME, DISK_ROOM) if is_disk else (HOST, WRITER)
        causes = np.full(len(gone), cause)
        if gone.is_corrupt is not None:
            causes[gone.is_corrupt] = CORRUPT
        owner.history.note_rest(gone.keys[:, 0], tier, causes, now=time.time())

    def _note(self, entries: Entries, added: bool) -> None:
        masks = shares(entries.heads, len(self._streams))
        for stream, mask in zip(self._streams, masks, strict=True):
            stream.note(entries if mask is None else entries.chosen(mask), added)

    def _held(self, partition: int) -> Iterator[Entries]:
        """Yield the blocks that a partition is told of."""
        for delta in self._deltas:
            held = delta.held()
            mask = next(islice(shares(held.heads, len(self._streams)), partition, None))
            yield held if mask is None else held.chosen(mask)
