"""Turns changes of an arena into announcements that the lookup takes in unbroken order."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kvray.actors.lookup import Announcement, Answer
from kvray.errors import KVRayError
from kvray.store import Arena

_log = logging.getLogger("kvray.shard")

Announce = Callable[[Announcement], Answer]
"""Brings an announcement to the lookup; raises ShardUnavailable within its deadline."""

_ANNOUNCED_MAX = 20_000
"""Keys in one announcement; the rest follows in the next."""


class Announcer:
    """One shard's announcements; `collect` and `send` are called one after the other."""

    def __init__(self, shard: str, announce: Announce) -> None:
        """Announce for `shard`."""
        self._shard = shard
        self._announce = announce
        self._seen: Any = None
        self._held_keys: Any = None
        self._held_parts: Any = None
        self._held: Any = None
        self._pending: list[tuple[Any, Any, bool]] = []
        self._sequence = 0
        self._lookup_epoch: str | None = None

    def collect(self, arena: Arena) -> bool:
        """Note what changed in `arena`; True if there is something to announce."""
        if self._seen is None:
            rows = arena.tables.geometry.num_slots
            # A version no slot has, so that what an adopted arena holds counts as a change.
            self._seen = arena.tables.slot_version.copy() - np.uint32(1)
            self._seen[arena.tables.slot_version == 0] = 0
            self._held = np.zeros(rows, dtype=bool)
            self._held_keys = np.zeros((rows, 4), dtype="<u8")
            self._held_parts = np.zeros(rows, dtype=np.uint32)
        slots, ready, keys = arena.changes_since(self._seen)
        if len(slots):
            parts = arena.tables.slot_part[slots]
            gone = self._held[slots]
            self._note(self._held_keys[slots[gone]], self._held_parts[slots[gone]], False)
            self._note(keys[ready], parts[ready], True)
            self._held[slots] = ready
            self._held_keys[slots], self._held_parts[slots] = keys, parts
        return bool(self._pending)

    def send(self, shard_epoch: int) -> None:
        """Announce what was noted, or just a heartbeat; what fails is sent again later."""
        full = self._lookup_epoch is None
        announcement = self._full(shard_epoch) if full else self._next(shard_epoch)
        try:
            answer = self._announce(announcement)
        except KVRayError as error:
            _log.debug("%s: not announced: %s", self._shard, error)
            self._lookup_epoch = None
            return
        if answer.resync or (not full and answer.lookup_epoch != self._lookup_epoch):
            self._lookup_epoch = None
            return
        self._lookup_epoch = answer.lookup_epoch
        self._sequence = announcement.sequence

    def _note(self, keys: Any, parts: Any, added: bool) -> None:
        if len(keys):
            self._pending.append((keys, parts, added))

    def _full(self, shard_epoch: int) -> Announcement:
        self._pending.clear()
        held = np.flatnonzero(self._held)
        return Announcement(
            shard=self._shard,
            shard_epoch=shard_epoch,
            sequence=0,
            added_keys=self._held_keys[held].tobytes(),
            added_parts=self._held_parts[held].tolist(),
            removed_keys=b"",
            removed_parts=[],
        )

    def _next(self, shard_epoch: int) -> Announcement:
        added_keys, removed_keys = bytearray(), bytearray()
        added_parts: list[int] = []
        removed_parts: list[int] = []
        while self._pending and len(added_parts) + len(removed_parts) < _ANNOUNCED_MAX:
            keys, parts, added = self._pending[0]
            # Removals are applied first: an addition must not be overtaken by an older removal.
            if not added and added_parts:
                break
            self._pending.pop(0)
            (added_keys if added else removed_keys).extend(keys.tobytes())
            (added_parts if added else removed_parts).extend(parts.tolist())
        return Announcement(
            shard=self._shard,
            shard_epoch=shard_epoch,
            sequence=self._sequence + 1,
            added_keys=bytes(added_keys),
            added_parts=added_parts,
            removed_keys=bytes(removed_keys),
            removed_parts=removed_parts,
        )
