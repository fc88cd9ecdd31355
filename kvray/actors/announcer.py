"""Turns changes of a node's tiers into announcements that the lookup takes in unbroken order.

To the lookup a node has a block or has it not, in memory or on disk. What leaves one tier is
announced as gone only if the other has not got it; what one tier is found to have is announced
again even if the other has it. So of two changes that cross, the later look sets it right.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvray.actors.lookup import Announcement, Answer
from kvray.actors.opening_desk import OpeningDesk
from kvray.actors.shelf import Entries, Shelf
from kvray.errors import KVRayError
from kvray.store import ArenaOwner
from kvray.store.departures import CORRUPT, DISK_ROOM, HOST, NVME, WRITER
from kvray.store.nvme import NvmeStore

_log = logging.getLogger("kvray.shard")

Announce = Callable[[Announcement], Answer]
"""Brings an announcement to the lookup; raises ShardUnavailable within its deadline."""

_DISK_S = 0.5
"""How often a disk is looked at, which may have tens of millions of slots."""
ANNOUNCED_MAX = 20_000
"""Keys in one announcement; the rest follows in the next."""


class Announcer:
    """One shard's announcements; `collect` and `send` are called one after the other."""

    def __init__(self, shard: str, announce: Announce) -> None:
        """Announce for `shard`, and what is noted at its `desk`."""
        self.desk = OpeningDesk()
        self._answer: Answer | None = None
        self._shard = shard
        self._announce = announce
        self._arena_id = ""
        # The arena's, and the disk's if there is one.
        self._shelves: list[Shelf] = []
        # (keys, parts, whether they were added); the lookup has all that came before.
        self._pending: deque[tuple[Any, Any, bool]] = deque()
        self._untold_since: float | None = None
        self._num_told = 0
        self._telling_s = 0.0
        self._sequence = 0
        self._ranks: list[tuple[str, int]] = []
        self._ranks_said: list[tuple[str, int]] | None = None
        self._num_shards = 0
        self._lookup_epoch: str | None = None
        self._is_heard = True

    @property
    def num_shards(self) -> int:
        """Live shards of the tier, as the lookup said last; 0 while it does not answer."""
        return self._num_shards

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
        """Note what changed in the arena of `owner` and in the `store` below it.

        Returns:
            Whether something is to be announced at once. While the lookup does not answer, the
            next heartbeat is early enough.
        """
        if not self._shelves:
            self._arena_id = owner.arena.arena_id
            self._shelves.append(Shelf(lambda: owner.arena.tables, owner.changes_since))
            if store is not None:
                self._shelves.append(
                    Shelf(lambda: store.tables, store.changes_since, every_s=_DISK_S)
                )
        if self._answer is not None:
            self.desk.settle(self._answer.findings)
            parts = np.flatnonzero(self._shelves[0].num_held).tolist()
            owner.give_up(self._answer.orphans, parts)
            self._answer = None
        for shelf in self._shelves:
            changed = shelf.collect()
            if changed is not None:
                gone, come = changed
                self._note_gone(owner, gone, is_disk=shelf is not self._shelves[0])
                for other in self._shelves:
                    if other is not shelf and len(gone):
                        gone = gone.chosen(~other.has(gone))
                self._note(gone, False)
                self._note(come, True)
        is_new = bool(self._pending) or self._ranks != self._ranks_said
        return self._is_heard and (is_new or self._lookup_epoch is None)

    def send(self, shard_epoch: int) -> None:
        """Announce what was noted, or just a heartbeat; what fails is sent again later."""
        full = self._lookup_epoch is None
        if full:
            self._pending.clear()
            for shelf in self._shelves:
                self._note(shelf.held(), True)
        # Never a number twice: one that seems lost may still arrive.
        self._sequence += 1
        ranks = self._ranks
        announcement = self._next(shard_epoch, full=full, ranks=ranks)
        try:
            answer = self._announce(announcement)
        except KVRayError as error:
            if self._is_heard:
                _log.warning("%s: the lookup cannot be told: %s", self._shard, error)
            self._is_heard, self._lookup_epoch = False, None
            self._num_shards = 0
            self._pending.clear()
            return
        if not self._is_heard:
            _log.info("%s: the lookup answers again", self._shard)
        self._is_heard = True
        same = full or answer.lookup_epoch == self._lookup_epoch
        self._lookup_epoch = answer.lookup_epoch if same and not answer.resync else None
        if not answer.resync:
            self._note_told()
            self._answer, self._ranks_said = answer, ranks
            self._num_shards = answer.num_shards

    def _note_told(self) -> None:
        """The lookup has taken an announcement; what is left is at most as old as it was."""
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
        owner.departures.note_rest(gone.keys[:, 0], tier, causes, now=time.time())

    def _note(self, entries: Entries, added: bool) -> None:
        if len(entries) and self._untold_since is None:
            self._untold_since = time.monotonic()
        for start in range(0, len(entries), ANNOUNCED_MAX):
            part = slice(start, start + ANNOUNCED_MAX)
            self._pending.append((entries.keys[part], entries.parts[part], added))

    def _next(self, shard_epoch: int, *, full: bool, ranks: list[tuple[str, int]]) -> Announcement:
        added_keys, removed_keys = bytearray(), bytearray()
        added_parts: list[int] = []
        removed_parts: list[int] = []
        while self._pending:
            keys, parts, added = self._pending[0]
            if len(added_parts) + len(removed_parts) + len(keys) > ANNOUNCED_MAX:
                break
            # Removals are applied first: an addition must not be overtaken by an older removal.
            if not added and added_parts:
                break
            self._pending.popleft()
            (added_keys if added else removed_keys).extend(keys.tobytes())
            (added_parts if added else removed_parts).extend(parts.tolist())
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
            openings=self.desk.due(full=full),
            more=bool(self._pending),
            ranks=ranks if full or ranks != self._ranks_said else None,
        )
