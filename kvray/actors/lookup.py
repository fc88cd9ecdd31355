"""The lookup: knows which shard holds which block, from what the shards announce."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.openings import Finding, Note, StoredOpenings
from kvray.index import Index

_NAMESPACES_MAX = 128
_OPENINGS_MAX = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What became resident or was evicted in one shard since its announcement before."""

    shard: str
    arena_id: str
    """A new arena counts its epochs anew: they are told apart by it."""
    shard_epoch: int
    sequence: int
    """One more than that of the announcement made before it, whatever became of that one."""
    full: bool
    """It stands by itself: what the shard has, or the first of it, and nothing else."""
    added_keys: bytes
    added_parts: list[int]
    removed_keys: bytes
    removed_parts: list[int]
    openings: list[Note] = field(default_factory=list)
    """What engines have noted since, or, if `full`, all that is remembered of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The lookup's answer to an announcement."""

    lookup_epoch: str
    """New at every start of the lookup: a shard that sees it change announces everything."""
    resync: bool
    """The announcement did not follow the last one; nothing was taken from it."""
    findings: list[Finding] = field(default_factory=list)
    """What of the misses among its `openings` is stored in another namespace."""


class Lookup:
    """Keeps the index in step with announcements.

    A shard's announcements are numbered within its epoch, and no number is given twice. One that
    does not follow the last is refused and answered with `resync`: the shard then sends a full
    one, which is taken unless a later one was. So whatever is lost, repeated or reordered, the
    index is what one shard said in an unbroken sequence.
    """

    def __init__(self) -> None:
        """Start empty, with a fresh epoch."""
        self.index = Index()
        self._openings = StoredOpenings(namespaces_max=_NAMESPACES_MAX, openings_max=_OPENINGS_MAX)
        self.epoch = secrets.token_hex(8)
        self._last: dict[str, tuple[str, int, int]] = {}
        self._heard: dict[str, float] = {}

    def announce(self, announcement: Announcement, now: float) -> Answer:
        """Take an announcement, which is a heartbeat too.

        Raises:
            ConfigError: its keys and parts do not belong together; the shard has to resync.
        """
        shard = announcement.shard
        if not self._follows(announcement):
            return Answer(lookup_epoch=self.epoch, resync=True)
        # Forgotten until all of it is in: half an announcement must not be built upon.
        last = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        self._last.pop(shard, None)
        if announcement.full:
            self.index.drop(shard)
        self.index.remove(shard, announcement.removed_keys, announcement.removed_parts)
        self.index.add(shard, announcement.added_keys, announcement.added_parts)
        self._last[shard] = last
        self._heard[shard] = now
        findings = self._openings.take(announcement.openings)
        return Answer(lookup_epoch=self.epoch, resync=False, findings=findings)

    def _follows(self, announcement: Announcement) -> bool:
        """Return whether what the shard says can be put upon what is known of it."""
        here = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        arena_id, epoch, sequence = self._last.get(announcement.shard, ("", -1, -1))
        if announcement.full:
            return here[0] != arena_id or here[1:] > (epoch, sequence)
        return here == (arena_id, epoch, sequence + 1)

    def shards(self) -> list[str]:
        """Return the shards that it knows of."""
        return list(self._heard)

    def drop(self, shard: str) -> None:
        """Forget a shard whose node has gone."""
        self.index.drop(shard)
        self._last.pop(shard, None)
        self._heard.pop(shard, None)

    def status(self, now: float) -> dict[str, Any]:
        """Return figures for people."""
        heard = {shard: now - at for shard, at in self._heard.items()}
        entries = self.index.entries()
        return {
            "epoch": self.epoch,
            "keys": len(self.index),
            "openings": len(self._openings),
            "shards": {
                shard: {"entries": entries.get(shard, 0), "heard_s_ago": round(ago, 3)}
                for shard, ago in heard.items()
            },
        }
