"""The lookup: one actor that knows which shard holds which block."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from kvray.index import Index, Match, split_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What became resident or was evicted in one shard since its announcement before."""

    shard: str
    shard_epoch: int
    sequence: int
    """0 for a full one; else one more than the last that was answered without `resync`."""
    added_keys: bytes
    added_parts: list[int]
    removed_keys: bytes
    removed_parts: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The lookup's answer to an announcement."""

    lookup_epoch: str
    """New at every start of the lookup: a shard that sees it change announces everything."""
    resync: bool
    """The announcement did not follow the last one; nothing was taken from it."""


class Lookup:
    """Keeps the index in step with announcements.

    A shard's announcements are numbered within its epoch. One that does not follow the last is
    refused and answered with `resync`: the shard then sends a full one. So whatever is lost,
    repeated or reordered, the index is what one shard said in an unbroken sequence.
    """

    def __init__(self) -> None:
        """Start empty, with a fresh epoch."""
        self.index = Index()
        self.epoch = secrets.token_hex(8)
        self._last: dict[str, tuple[int, int]] = {}
        self._heard: dict[str, float] = {}

    def announce(self, announcement: Announcement, now: float) -> Answer:
        """Take an announcement, which is a heartbeat too."""
        shard = announcement.shard
        epoch, sequence = announcement.shard_epoch, announcement.sequence
        last_epoch, last_sequence = self._last.get(shard, (-1, -1))
        if epoch < last_epoch or (
            sequence > 0 and (epoch, sequence) != (last_epoch, last_sequence + 1)
        ):
            return Answer(lookup_epoch=self.epoch, resync=True)
        if sequence == 0:
            self.index.drop(shard)
        self.index.remove(shard, announcement.removed_keys, announcement.removed_parts)
        self.index.add(shard, announcement.added_keys, announcement.added_parts)
        self._last[shard] = (epoch, sequence)
        self._heard[shard] = now
        return Answer(lookup_epoch=self.epoch, resync=False)

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
            "shards": {
                shard: {"entries": entries.get(shard, 0), "heard_s_ago": round(ago, 3)}
                for shard, ago in heard.items()
            },
        }


class LookupActor:
    """The Ray actor around a `Lookup`; synchronous, calls carry whole batches."""

    def __init__(self, cluster_name: str) -> None:
        """Serve the tier `cluster_name`."""
        self._cluster_name = cluster_name
        self._lookup = Lookup()

    def cluster_name(self) -> str:
        """Return the name of the tier."""
        return self._cluster_name

    def announce(self, announcement: Announcement) -> Answer:
        """See `Lookup.announce`."""
        return self._lookup.announce(announcement, time.monotonic())

    def match(self, keys: bytes, num_parts: int) -> Match:
        """Return the longest run of `keys` (end to end, 32 bytes each) that shards hold."""
        return self._lookup.index.match(split_keys(keys), num_parts)  # type: ignore[arg-type]

    def drop(self, shard: str) -> None:
        """See `Lookup.drop`."""
        self._lookup.drop(shard)

    def status(self) -> dict[str, Any]:
        """See `Lookup.status`."""
        return self._lookup.status(time.monotonic())

    def __repr__(self) -> str:
        return f"Lookup({self._cluster_name})"
