"""The lookup: knows which shards hold which blocks, from their logs of changes.

It also knows which rank is registered with which shard, and tells shards of parts that are useless
without those of other nodes.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from kvray.actors.lookup.delta import Cursor, Delta, Poll, unpacked_parts
from kvray.identity.block import KEY_BYTES
from kvray.index import Index, Loss, Match, Run

SILENT_S = 1.5
"""Answers leave out a shard whose poll is unanswered for so long: three of its heartbeats."""
CALLS_PER_S = 400
"""Polls of all shards together: a fifth of what one Ray actor takes."""
_SHARDS_UNPACED = 20
"""So few shards are asked again at once."""
_PURGED_SLOTS = 100_000
"""Slots of the index that one reply purges: some milliseconds of work."""
QUEUED_MAX = 65_536  # keys queued for one shard; the oldest of more are dropped
HANDED_MAX = 2048  # keys in one poll: they travel with the call
RANKS_MAX = 4096  # ranks kept of one shard: far more than a node has


@dataclass(slots=True)
class _Shard:
    """One shard of the tier, as it has said."""

    cursor: Cursor | None = None  # None: nothing of its log, or half a reply, was taken
    heard_at: float | None = None  # None: it has not replied yet
    is_leaving: bool = False
    namespaces: tuple[int, ...] = ()
    ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    """Replica and rank -> number of the reply since which each has named it."""
    partial: deque[tuple[bytes, int]] = field(default_factory=lambda: deque(maxlen=QUEUED_MAX))
    """Keys of partial blocks with the lost parts, the oldest first; advice: a lost poll does no
    harm."""


class Lookup:
    """Keeps the index in step with the logs of shards; pure but for its clock.

    It has a cursor in each shard's log. A shard repeats what comes after the cursor of a poll, so
    lost, repeated or reordered replies do no harm: only a reply to the cursor that counts now is
    taken. Without a cursor, after a start or with a new log, the shard lists all its blocks.

    The more shards there are, the less often each is asked: the polls of all of them are few enough
    to leave time for queries.

    Answers leave out a shard that has not answered a poll for long, until it does. It still holds
    its blocks, until it says otherwise or is not among the tier's shards any more.
    """

    def __init__(
        self, silent_s: float = SILENT_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.index = Index()
        self.clock = clock
        self.step_keys = 4000
        """Blocks that one step of `take` changes, as many as the caller has time for."""
        self._silent_s = silent_s
        self._shards: dict[str, _Shard] = {}
        self._live: set[str] = set()
        """Those that have replied and are not silent."""
        # The first poll that each has not answered, the oldest first: a call visits only those that
        # fall silent.
        self._unanswered: OrderedDict[str, float] = OrderedDict()
        # Of all shards; put together when one changes, as hundreds of polls a second carry it.
        self._namespaces: tuple[int, ...] = ()
        self._num_replies = self._num_resyncs = self._num_queries = self._num_queried = 0

    def keep(self, shards: Iterable[str]) -> None:
        """Have these shards in the tier, and forget the others: their nodes are gone."""
        kept = {shard: self._shards.get(shard) or _Shard() for shard in shards}
        gone, self._shards = self._shards.keys() - kept.keys(), kept
        for shard in gone:
            self.index.drop(shard)
            self._live.discard(shard)
            self._unanswered.pop(shard, None)
        if gone:
            self._gather_namespaces()

    @property
    def pace_s(self) -> float:
        """Time between two polls of a shard; 0: without a pause."""
        return max(0, len(self._shards) - _SHARDS_UNPACED) / CALLS_PER_S

    def poll(self, shard: str, partition: int, most: int) -> Poll:
        """Return the next poll of `shard`, which is asked now."""
        self._silence()
        self._unanswered.setdefault(shard, self.clock())
        return Poll(
            partition=partition,
            cursor=self._shards[shard].cursor,
            most=most,
            pace_s=self.pace_s,
            num_shards=len(self._live) + (shard not in self._live),
            namespaces=self._namespaces,
            partial_keys=self._partial_keys(self._shards[shard].partial),
        )

    def take(self, shard: str, delta: Delta) -> Iterator[int]:
        """Take a reply in short steps; yield after each how many blocks it changed.

        Until the last step the shard has no cursor: nothing builds on half a reply. ConfigError:
        its keys and parts do not match.
        """
        one = self._shards.get(shard)
        if one is None or delta.since != one.cursor:
            return
        one.cursor, one.heard_at = None, self.clock()
        self._live.add(shard)
        self._unanswered.pop(shard, None)
        self._num_replies += 1
        named = islice(delta.ranks, RANKS_MAX)
        one.ranks = {rank: one.ranks.get(rank, self._num_replies) for rank in named}
        one.is_leaving = delta.is_leaving
        if delta.namespaces != one.namespaces:
            one.namespaces = delta.namespaces
            self._gather_namespaces()
        if delta.is_full:
            self._num_resyncs += 1
            self.index.restart(shard)
        self.index.set_silent(shard, False)
        yield from self._change(shard, delta.removed_keys, delta.removed_parts, added=False)
        yield from self._change(shard, delta.added_keys, delta.added_parts, added=True)
        if not delta.more:
            self.index.settle(shard)
        self._note_losses(self.index.purge(_PURGED_SLOTS))
        one.cursor, one.heard_at = delta.cursor, self.clock()

    def _change(self, shard: str, keys: bytes, packed: bytes, *, added: bool) -> Iterator[int]:
        parts, at = unpacked_parts(packed), 0
        while at < max(len(parts), len(keys) // KEY_BYTES):
            stop = at + self.step_keys
            some, of = keys[at * KEY_BYTES : stop * KEY_BYTES], parts[at:stop]
            if added:
                self.index.add(shard, some, of)
            else:
                self._note_losses(self.index.remove(shard, some, of))
            at = stop
            yield len(of)

    def _note_losses(self, losses: list[Loss]) -> None:
        """Queue partial blocks for the shards that hold their remaining parts."""
        for loss in losses:
            starts = range(0, len(loss.keys), KEY_BYTES)
            lost = [(loss.keys[at : at + KEY_BYTES], loss.parts) for at in starts]
            for shard in self._shards.keys() & loss.shards:
                self._shards[shard].partial.extend(lost)

    def _partial_keys(self, queue: deque[tuple[bytes, int]]) -> bytes:
        """Take keys that a shard should evict first, but those whose parts were stored again."""
        taken = [queue.popleft() for _ in range(min(len(queue), HANDED_MAX))]
        return b"".join(
            self.index.still_lost(b"".join(key for key, _ in same), parts)
            for parts, same in groupby(taken, itemgetter(1))
        )

    def _gather_namespaces(self) -> None:
        of_each = (one.namespaces for one in self._shards.values())
        self._namespaces = tuple(set(chain.from_iterable(of_each)))

    def match(self, num_parts: int, *keys: bytes) -> Match:
        """Return the longest run of `keys` (end to end, `in_pieces`) with holders."""
        return self.index.match(self._asked(keys), num_parts)

    def locate(self, *keys: bytes) -> list[Run]:
        """Return the holders of `keys` (end to end, `in_pieces`), but of silent shards."""
        return self.index.locate(self._asked(keys))

    def replica(self, replica: str) -> dict[int, str]:
        """Return rank -> the shard that it is registered with, without silent shards.

        Of two shards that name a rank the later one counts.
        """
        self._silence()
        newest: dict[int, tuple[int, str]] = {}
        for shard in self._live:
            for (name, rank), number in self._shards[shard].ranks.items():
                if name == replica:
                    newest[rank] = max(newest.get(rank, (0, "")), (number, shard))
        return {rank: shard for rank, (_, shard) in sorted(newest.items())}

    def shards(self) -> list[str]:
        """Return the shards that it has heard."""
        return [shard for shard, one in self._shards.items() if one.heard_at is not None]

    def targets(self) -> list[str]:
        """Return the shards that blocks may be brought to for later: their nodes stay."""
        self._silence()
        return sorted(shard for shard in self._live if not self._shards[shard].is_leaving)

    def status(self) -> dict[str, Any]:
        """Return figures for people, and the shards that are heard and silent."""
        self._silence()
        now, entries, keys = self.clock(), self.index.entries(), len(self.index)
        shards = {shard: self._shards[shard] for shard in sorted(self.shards())}
        return {
            "keys": keys,
            "entries": sum(entries.values()),
            "bytes": self.index.num_bytes,
            "bytes_per_key": round(self.index.num_bytes / max(1, keys), 1),
            "queries": self._num_queries,
            "queried_blocks": self._num_queried,
            "resyncs": self._num_resyncs,
            "ranks": sum(len(one.ranks) for one in shards.values()),
            "silent": [shard for shard in shards if shard not in self._live],
            "leaving": [shard for shard, one in shards.items() if one.is_leaving],
            "shards": {
                shard: {
                    "entries": entries.get(shard, 0),
                    "heard_s_ago": round(now - one.heard_at, 3),
                }
                for shard, one in shards.items()
                if one.heard_at is not None
            },
        }

    def _asked(self, pieces: Iterable[bytes]) -> bytes:
        """Return the keys of a query, which is counted."""
        self._silence()
        keys = b"".join(pieces)
        self._num_queries += 1
        self._num_queried += len(keys) // KEY_BYTES
        return keys

    def _silence(self) -> None:
        """Leave out the shards whose polls are unanswered for too long."""
        # A shard may keep a poll for as long as the pace allows.
        since = self.clock() - self._silent_s - 3 * self.pace_s
        while self._unanswered and next(iter(self._unanswered.values())) < since:
            shard, _ = self._unanswered.popitem(last=False)
            self._live.discard(shard)
            self.index.set_silent(shard, True)
