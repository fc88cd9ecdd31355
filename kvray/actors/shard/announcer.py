"""Turns changes of a node's tiers into announcements that the lookup takes in unbroken order.

For the lookup, a node either has a block, in memory or on disk, or it does not. A block that leaves
one tier is announced as gone only if the other tier lacks it. A block found in one tier is
announced even if the other has it too. So if two changes cross, the later look corrects them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np

from kvray.actors.lookup.lookup import Announcement, Answer
from kvray.actors.shard.digest_desk import DigestDesk
from kvray.actors.shard.tier_delta import Entries, TierDelta
from kvray.errors import KVRayError, ShardUnavailable
from kvray.store import ArenaOwner
from kvray.store.block_history import CORRUPT, DISK_ROOM, HOST, NVME, WRITER
from kvray.store.nvme import NvmeStore

_log = logging.getLogger("kvray.shard")

Announce = Callable[[Announcement], Answer | None]
"""Brings an announcement to the lookup and returns the answer; None if that is still to come.

Called again with the same announcement, it waits on. Raises KVRayError once there will be none.
"""

ANNOUNCED_MAX = 20_000  # keys in one announcement; the rest follows in the next
_LEAST_MAX = 128
_PIECE_S = 0.01
"""How long the lookup may work on one announcement: from others it has queries meanwhile."""
_FIRST_MAX = 500
"""Keys with which a full announcement begins: it may be told to wait, and to send it is cheap."""
_PATIENCE_S = 30.0
"""How long an answer is waited for; the lookup takes nothing that is older. After each that did not
come it is twice as long: else a lookup that is slow enough would never get to anything in time."""
_PATIENCE_MAX_S = 480.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 4.0


class Announcer:
    """One shard's announcements; `collect` and `send` are called one after the other.

    At most one announcement of a shard is under way. So the lookup works on one piece of each
    shard, and a late answer counts like any other. A shard repeats an announcement only if the
    lookup has lost it, or refuses it.
    """

    def __init__(self, shard: str, announce: Announce) -> None:
        self.desk = DigestDesk()
        self._answer: Answer | None = None
        self._shard = shard
        self._random = Random(shard)  # its own: shards that start together must not send together
        self._announce = announce
        self._arena_id = ""
        self._store: NvmeStore | None = None
        # The arena's, and the disk's if there is one.
        self._deltas: list[TierDelta] = []
        # (keys, parts, whether they were added); the lookup has all that came before.
        self._pending: deque[tuple[Any, Any, bool]] = deque()
        self._untold_since: float | None = None
        self._num_told = 0
        self._telling_s = 0.0
        self._sequence = 0
        self._ranks: list[tuple[str, int]] = []
        self._ranks_said: list[tuple[str, int]] | None = None
        self.num_shards = 0
        """Live shards of the tier, as the lookup said last; 0 while it does not answer."""
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
        # A repeated announcement still owes the lookup its end and the digests.
        self._owes_end = self._owes_digests = False
        self._keys_max = ANNOUNCED_MAX
        # An epoch of the lookup, and by how much its clock is ahead.
        self._lookup_clock: tuple[str, float] | None = None

    def status(self) -> dict[str, Any]:
        """Return how far the lookup is behind; from any thread.

        `lag_s` is the age of the oldest change that it was not told of, `seconds` the sum of what
        those that it was told of had at that time, one for each of the `announcements` with any.
        """
        since = self._untold_since
        return {
            "lag_s": 0.0 if since is None else time.monotonic() - since,
            "announcements": self._num_told,
            "seconds": self._telling_s,
        }

    def name_ranks(self, ranks: Iterable[tuple[str, int]]) -> None:
        """Have it announced that these (replica, rank), and no others, are registered here."""
        self._ranks = sorted(ranks)

    def collect(self, owner: ArenaOwner, store: NvmeStore | None = None) -> bool:
        """Note what changed in both tiers; return whether to announce it at once.

        While the lookup does not answer, the next heartbeat is early enough.
        """
        self._follow(owner, store)
        if self._answer is not None:
            self.desk.settle(self._answer.findings)
            parts = np.flatnonzero(self._deltas[0].num_held).tolist()
            owner.give_up(self._answer.partial_keys, parts)
            self._answer = None
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
        is_new = bool(self._pending) or self._owes_end or self._ranks != self._ranks_said
        may_send = self._is_heard and time.monotonic() >= self._send_at
        return may_send and (is_new or self._lookup_epoch is None)

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
        self._lookup_epoch, self._is_outdated = None, True

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
        try:
            answer = self._announce(self._under_way)
            if answer is None and time.monotonic() > self._sent_at + self._patience_s:
                waited_s = self._patience_s
                self._patience_s = min(2 * waited_s, _PATIENCE_MAX_S)
                raise ShardUnavailable(f"No answer within {waited_s:.0f} s; see `kvray status`.")
        except KVRayError as error:
            self._give_up(error)
            return
        if answer is None:
            self._note_unheard("it has not answered yet")
            return
        announcement, self._under_way = self._under_way, None
        self._take(announcement, answer)

    def _take(self, announcement: Announcement, answer: Answer) -> None:
        if not self._is_heard:
            _log.info("%s: the lookup answers again", self._shard)
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
        else:
            self._owes_digests = False
        self._owes_end = announcement.more
        self._fit_to(announcement, answer.took_s)
        self._note_told()
        self._answer = answer
        if not self._pending and not self._owes_end:
            self._send_at = now + answer.pause_s * self._random.uniform(0.75, 1.25)
        if announcement.ranks is not None:
            self._ranks_said = announcement.ranks

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
            _log.warning("%s: the lookup cannot be told: %s", self._shard, why)
        self._is_heard = False
        self.num_shards = 0

    def _fit_to(self, announcement: Announcement, took_s: float) -> None:
        """Have the next pieces be as large as the lookup takes in a moment."""
        num_keys = len(announcement.added_parts) + len(announcement.removed_parts)
        if took_s > _PIECE_S:
            fitting = max(_LEAST_MAX, int(num_keys * _PIECE_S / took_s))
            self._keys_max = min(self._keys_max, fitting)
        elif took_s < _PIECE_S / 2 and num_keys >= self._keys_max:
            self._keys_max *= 4

    def _note_all(self) -> None:
        self._pending.clear()
        for delta in self._deltas:
            self._note(delta.held(), True)

    def _note_told(self) -> None:
        """The lookup has taken an announcement; the remaining changes are no older."""
        if self._untold_since is not None:
            self._num_told += 1
            self._telling_s += time.monotonic() - self._untold_since
            if not self._pending:
                self._untold_since = None

    def _note_gone(self, owner: ArenaOwner, gone: Entries, *, is_disk: bool) -> None:
        """Have it remembered what has left a tier without the owner's doing."""
        tier, cause = (NVME, DISK_ROOM) if is_disk else (HOST, WRITER)
        causes = np.full(len(gone), cause)
        if gone.is_corrupt is not None:
            causes[gone.is_corrupt] = CORRUPT
        owner.history.note_rest(gone.keys[:, 0], tier, causes, now=time.time())

    def _note(self, entries: Entries, added: bool) -> None:
        if not len(entries):
            return
        if self._untold_since is None:
            self._untold_since = time.monotonic()
        self._pending.append((entries.keys, entries.parts, added))

    def _next(self, shard_epoch: int, *, full: bool) -> Announcement:
        if full:
            # The first piece shows how long a key takes.
            self._owes_digests, self._keys_max = True, _FIRST_MAX
            if not self._has_to_ask:
                self._note_all()
            else:
                self._pending.clear()
        is_question, room = full and self._has_to_ask, min(self._keys_max, ANNOUNCED_MAX)
        added_keys, removed_keys = bytearray(), bytearray()
        added_parts: list[int] = []
        removed_parts: list[int] = []
        while self._pending and room:
            keys, parts, added = self._pending[0]
            # Removals are applied first: an addition must not be overtaken by an older removal.
            if not added and added_parts:
                break
            if len(keys) > room:
                self._pending[0] = keys[room:], parts[room:], added
            else:
                self._pending.popleft()
            (added_keys if added else removed_keys).extend(keys[:room].tobytes())
            (added_parts if added else removed_parts).extend(parts[:room].tolist())
            room -= min(room, len(keys))
        return Announcement(
            shard=self._shard,
            arena_id=self._arena_id,
            shard_epoch=shard_epoch,
            sequence=self._sequence,
            full=full,
            added_keys=bytes(added_keys),
            added_parts=added_parts,
            removed_keys=bytes(removed_keys),
            removed_parts=removed_parts,
            prefix_digests=self.desk.due(full=self._owes_digests and not is_question),
            more=is_question or bool(self._pending),
            ranks=self._ranks if full or self._ranks != self._ranks_said else None,
            until=self._deadline(),
        )

    def _deadline(self) -> tuple[str, float] | None:
        """Return when this shard gives up on what it announces now, by the lookup's clock."""
        if self._lookup_clock is None:
            return None
        epoch, ahead_s = self._lookup_clock
        return epoch, time.monotonic() + ahead_s + self._patience_s
