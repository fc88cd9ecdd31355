"""The lookup: knows which shard holds which block, from what the shards announce."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.openings import Finding, Note, StoredOpenings
from kvray.actors.orphans import Orphans
from kvray.actors.rank_directory import RankDirectory
from kvray.block import KEY_BYTES, Namespace
from kvray.index import Index, Match, Run

SILENT_S = 1.5
"""Silence after which a shard is left out of answers; three of its heartbeats."""

_NAMESPACES_MAX = 128
_OPENINGS_MAX = 8192
_PURGED_SLOTS = 100_000
"""Slots of the index that one announcement has looked at for what is to go: some milliseconds."""


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
    more: bool = False
    """What the shard has to say did not fit in; the next announcement goes on."""
    ranks: list[tuple[str, int]] | None = None
    """Replica and rank of all that are registered with it; None if they are as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The lookup's answer to an announcement."""

    lookup_epoch: str
    """New at every start of the lookup: a shard that sees it change announces everything."""
    resync: bool
    """The announcement did not follow the last one; nothing was taken from it."""
    findings: list[Finding] = field(default_factory=list)
    """What of the misses among its `openings` is stored in another namespace."""
    num_shards: int = 0
    """Shards that were heard of late, the one that asks included."""
    orphans: bytes = b""
    """Keys of blocks of which other shards' parts are gone, so that the shard's own are of no use;
    32 bytes each, end to end."""


class Lookup:
    """Keeps the index in step with announcements.

    A shard's announcements are numbered within its epoch, and no number is given twice. One that
    does not follow the last is refused and answered with `resync`: the shard then sends a full
    one, which is taken unless a later one was. So whatever is lost, repeated or reordered, the
    index is what one shard said in an unbroken sequence. What a shard has may be too much for one
    announcement: the full one is then its beginning, and those that follow add the rest.

    A shard that was silent for too long is left out of all answers until its next announcement. It
    still counts as a holder: only when it is dropped, or says so, are its blocks gone.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        """Start empty, with a fresh epoch.

        Args:
            silent_s: for how long a shard may be silent.
        """
        self.index = Index()
        self._silent_s = silent_s
        self._ranks = RankDirectory()
        self._orphans = Orphans()
        self._openings = StoredOpenings(namespaces_max=_NAMESPACES_MAX, openings_max=_OPENINGS_MAX)
        self.epoch = secrets.token_hex(8)
        self._num_resyncs = self._num_queries = self._num_queried = 0
        self._last: dict[str, tuple[str, int, int]] = {}
        self._heard: dict[str, float] = {}

    def announce(self, announcement: Announcement, now: float) -> Answer:
        """Take an announcement, which is a heartbeat too.

        Raises:
            ConfigError: its keys and parts do not belong together; the shard has to resync.
        """
        shard = announcement.shard
        if not self._follows(announcement):
            self._num_resyncs += 1
            return Answer(lookup_epoch=self.epoch, resync=True)
        # Forgotten until all of it is in: half an announcement must not be built upon.
        last = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        self._last.pop(shard, None)
        self._take(announcement)
        self._last[shard] = last
        self._heard[shard] = now
        findings = self._openings.take(announcement.openings)
        return Answer(
            lookup_epoch=self.epoch,
            resync=False,
            findings=findings,
            num_shards=len(self._live(now)),
            orphans=self._orphans.take(shard, self.index),
        )

    def _take(self, announcement: Announcement) -> None:
        shard, index = announcement.shard, self.index
        if announcement.ranks is not None:
            self._ranks.name(shard, announcement.ranks)
        if announcement.full:
            index.restart(shard)
        removed = index.remove(shard, announcement.removed_keys, announcement.removed_parts)
        index.add(shard, announcement.added_keys, announcement.added_parts)
        index.hear(shard)
        if not announcement.more:
            index.settle(shard)
        self._orphans.note(removed + index.purge(_PURGED_SLOTS))

    def _follows(self, announcement: Announcement) -> bool:
        """Return whether what the shard says can be put upon what is known of it."""
        here = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        arena_id, epoch, sequence = self._last.get(announcement.shard, ("", -1, -1))
        if announcement.full:
            return here[0] != arena_id or here[1:] > (epoch, sequence)
        return here == (arena_id, epoch, sequence + 1)

    def match(self, keys: bytes, num_parts: int, now: float) -> Match:
        """See `Index.match`; of shards that are not silent.

        Raises:
            ConfigError: as there.
        """
        self._live(now)
        self._count(keys)
        return self.index.match(keys, num_parts)

    def locate(self, keys: bytes, now: float) -> list[Run]:
        """See `Index.locate`; of shards that are not silent.

        Raises:
            ConfigError: as there.
        """
        self._live(now)
        self._count(keys)
        return self.index.locate(keys)

    def replica(self, replica: str, now: float) -> dict[int, str]:
        """Return rank -> shard that it is registered with; those of silent shards are left out."""
        return self._ranks.replica(replica, self._live(now))

    def elsewhere(self, namespace: Namespace, opening: bytes) -> tuple[Namespace, str] | None:
        """See `StoredOpenings.elsewhere`."""
        return self._openings.elsewhere(namespace, opening)

    def shards(self) -> list[str]:
        """Return the shards that it knows of."""
        return list(self._heard)

    def drop(self, shard: str) -> None:
        """Forget a shard whose node has gone."""
        self.index.drop(shard)
        self._ranks.drop(shard)
        self._orphans.drop(shard)
        self._last.pop(shard, None)
        self._heard.pop(shard, None)

    def status(self, now: float) -> dict[str, Any]:
        """Return figures for people."""
        live, entries, keys = self._live(now), self.index.entries(), len(self.index)
        return {
            "epoch": self.epoch,
            "keys": keys,
            "entries": sum(entries.values()),
            "bytes": self.index.num_bytes,
            "bytes_per_key": round(self.index.num_bytes / max(1, keys), 1),
            "queries": self._num_queries,
            "queried_blocks": self._num_queried,
            "resyncs": self._num_resyncs,
            "openings": len(self._openings),
            "ranks": len(self._ranks),
            "silent": sorted(self._heard.keys() - live),
            "shards": {
                shard: {"entries": entries.get(shard, 0), "heard_s_ago": round(now - at, 3)}
                for shard, at in self._heard.items()
            },
        }

    def _count(self, keys: bytes) -> None:
        self._num_queries += 1
        self._num_queried += len(keys) // KEY_BYTES

    def _live(self, now: float) -> list[str]:
        """Return the shards that were heard of late, and have the others left out."""
        live = []
        for shard, at in self._heard.items():
            if now - at > self._silent_s:
                self.index.silence(shard)
            else:
                live.append(shard)
        return live
