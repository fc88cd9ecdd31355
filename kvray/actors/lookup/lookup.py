"""The lookup: knows which shards hold which blocks, from their logs of changes.

It also knows which rank is registered with which shard, and tells shards of parts that are useless
without those of other nodes.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from kvray.actors.lookup.delta import Cursor, Delta, Poll, unpacked_parts
from kvray.identity.block import KEY_BYTES
from kvray.index import Index, Loss, Match, Run

QUEUED_MAX = 65_536  # keys queued for one shard; the oldest of more are dropped

HANDED_MAX = 2048  # keys in one poll: they travel with the call


class PartialBlocks:
    """The queue of each shard; it is advice, so a lost poll does no harm."""

    def __init__(self) -> None:
        # Shard -> keys with their lost parts, the oldest first.
        self._queues: dict[str, deque[tuple[bytes, int]]] = {}

    def note(self, losses: list[Loss]) -> None:
        """Queue losses for the shards that hold the remaining parts."""
        for loss in losses:
            starts = range(0, len(loss.keys) if loss.shards else 0, KEY_BYTES)
            lost = [(loss.keys[at : at + KEY_BYTES], loss.parts) for at in starts]
            for shard in loss.shards:
                self._queues.setdefault(shard, deque(maxlen=QUEUED_MAX)).extend(lost)

    def take(self, shard: str, index: Index) -> bytes:
        """Take the keys of blocks that `shard` should evict first.

        Blocks whose parts were stored again are left out.
        """
        queue = self._queues.pop(shard, deque())
        taken = [queue.popleft() for _ in range(min(len(queue), HANDED_MAX))]
        if queue:
            self._queues[shard] = queue
        return b"".join(
            index.still_lost(b"".join(key for key, _ in same), parts)
            for parts, same in groupby(taken, itemgetter(1))
        )

    def drop(self, shard: str) -> None:
        """Drop the queue of `shard`."""
        self._queues.pop(shard, None)


RANKS_MAX = 4096  # ranks kept of one shard: far more than a node has


class RankDirectory:
    """Replica and rank -> shard. Of two shards that name a rank the later one counts."""

    def __init__(self) -> None:
        # Shard -> (replica, rank) -> number of the change that named it.
        self._ranks: dict[str, dict[tuple[str, int], int]] = {}
        self._changes = 0

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._ranks.values())

    def name(self, shard: str, ranks: Iterable[tuple[str, int]]) -> None:
        """Take all the ranks that are registered with `shard`."""
        named = set(islice(ranks, RANKS_MAX))
        self._changes += 1
        before = self._ranks.get(shard, {})
        self._ranks[shard] = {rank: before.get(rank, self._changes) for rank in named}

    def drop(self, shard: str) -> None:
        """Forget the ranks of `shard`."""
        self._ranks.pop(shard, None)

    def replica(self, replica: str, shards: Iterable[str]) -> dict[int, str]:
        """Return rank -> shard of the ranks of `replica`, as far as `shards` name them."""
        newest: dict[int, tuple[int, str]] = {}
        for shard in shards:
            for (name, rank), change in self._ranks.get(shard, {}).items():
                if name == replica:
                    newest[rank] = max(newest.get(rank, (-1, "")), (change, shard))
        return {rank: shard for rank, (_, shard) in sorted(newest.items())}


SILENT_S = 1.5
"""Answers leave out a shard whose poll is unanswered for so long: three of its heartbeats."""
CALLS_PER_S = 400
"""Polls of all shards together: a fifth of what one Ray actor takes."""
_SHARDS_UNPACED = 20
"""So few shards are asked again at once."""
_PURGED_SLOTS = 100_000
"""Slots of the index that one reply purges: some milliseconds of work."""


class Lookup:
    """Keeps the index in step with the logs of shards; pure but for the clock's time.

    It has a cursor in each shard's log. A shard repeats what comes after the cursor of a poll, so
    lost, repeated or reordered replies do no harm: only a reply to the cursor that counts now is
    taken. Without a cursor, after a start or with a new log, the shard lists all its blocks.

    The more shards there are, the less often each is asked: the polls of all of them are few enough
    to leave time for queries.

    Answers leave out a shard that has not answered a poll for long, until it does. It still holds
    its blocks, until it says otherwise or is not among the tier's shards any more.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.index = Index()
        self.step_keys = 4000
        """Blocks that one step of `take` changes, as many as the caller has time for."""
        self._silent_s = silent_s
        self._ranks = RankDirectory()
        self._partial_blocks = PartialBlocks()
        self._namespaces: dict[str, tuple[int, ...]] = {}
        # Of all shards; put together when one changes, as hundreds of polls a second carry it.
        self._all_namespaces: tuple[int, ...] = ()
        self._num_resyncs = self._num_queries = self._num_queried = 0
        self._shards: frozenset[str] = frozenset()
        self._cursors: dict[str, Cursor] = {}
        self._heard: dict[str, float] = {}
        # The first poll that each has not answered, the oldest first: a call visits only those that
        # fall silent.
        self._unanswered: OrderedDict[str, float] = OrderedDict()
        self._silent: set[str] = set()
        self._leaving: set[str] = set()

    def keep(self, shards: Iterable[str]) -> None:
        """Have these shards in the tier, and forget the others: their nodes are gone."""
        self._shards = frozenset(shards)
        for shard in self._heard.keys() - self._shards:
            self._leaving.discard(shard)
            self.index.drop(shard)
            self._ranks.drop(shard)
            self._name_namespaces(shard, ())
            self._partial_blocks.drop(shard)
            self._cursors.pop(shard, None)
            del self._heard[shard]
            self._silent.discard(shard)
        for shard in self._unanswered.keys() - self._shards:
            del self._unanswered[shard]

    @property
    def pace_s(self) -> float:
        """Time between two polls of a shard; 0: without a pause."""
        return max(0, len(self._shards) - _SHARDS_UNPACED) / CALLS_PER_S

    def poll(self, shard: str, partition: int, most: int, now: float) -> Poll:
        """Return the next poll of `shard`, which is asked now."""
        self._silence(now)
        self._unanswered.setdefault(shard, now)
        return Poll(
            partition=partition,
            cursor=self._cursors.get(shard),
            most=most,
            pace_s=self.pace_s,
            num_shards=len(self._live() | {shard}),
            namespaces=self._all_namespaces,
            partial_keys=self._partial_blocks.take(shard, self.index),
        )

    def take(self, shard: str, delta: Delta, clock: Callable[[], float]) -> Iterator[int]:
        """Take a reply in short steps; yield after each how many blocks it changed.

        Until the last step the shard has no cursor: nothing builds on half a reply. ConfigError:
        its keys and parts do not match.
        """
        if shard not in self._shards or delta.since != self._cursors.get(shard):
            return
        self._cursors.pop(shard, None)
        self._hear(shard, clock())
        self._ranks.name(shard, delta.ranks)
        self._name_namespaces(shard, delta.namespaces)
        (self._leaving.add if delta.is_leaving else self._leaving.discard)(shard)
        if delta.is_full:
            self._num_resyncs += 1
            self.index.restart(shard)
        yield from self._change(shard, delta.removed_keys, delta.removed_parts, added=False)
        yield from self._change(shard, delta.added_keys, delta.added_parts, added=True)
        self.index.set_silent(shard, False)
        if not delta.more:
            self.index.settle(shard)
        self._partial_blocks.note(self.index.purge(_PURGED_SLOTS))
        if delta.cursor is not None:
            self._cursors[shard] = delta.cursor
        self._hear(shard, clock())

    def _change(self, shard: str, keys: bytes, packed: bytes, *, added: bool) -> Iterator[int]:
        parts, at = unpacked_parts(packed), 0
        while at < max(len(parts), len(keys) // KEY_BYTES):
            stop = at + self.step_keys
            some, of = keys[at * KEY_BYTES : stop * KEY_BYTES], parts[at:stop]
            if added:
                self.index.add(shard, some, of)
            else:
                self._partial_blocks.note(self.index.remove(shard, some, of))
            at = stop
            yield len(of)

    def _hear(self, shard: str, now: float) -> None:
        self._heard[shard] = now
        self._unanswered.pop(shard, None)
        if shard in self._silent:
            self._silent.discard(shard)
            self.index.set_silent(shard, False)

    def _live(self) -> set[str]:
        return self._heard.keys() - self._silent

    def _name_namespaces(self, shard: str, namespaces: tuple[int, ...]) -> None:
        if namespaces == self._namespaces.get(shard, ()):
            return
        self._namespaces[shard] = namespaces
        if not namespaces:
            del self._namespaces[shard]
        self._all_namespaces = tuple(set(chain.from_iterable(self._namespaces.values())))

    def match(self, keys: bytes, num_parts: int, now: float) -> Match:
        """Match among shards that are not silent, as `Index.match`."""
        self._silence(now)
        self._count(keys)
        return self.index.match(keys, num_parts)

    def locate(self, keys: bytes, now: float) -> list[Run]:
        """Locate among shards that are not silent, as `Index.locate`."""
        self._silence(now)
        self._count(keys)
        return self.index.locate(keys)

    def replica(self, replica: str, now: float) -> dict[int, str]:
        """Return rank -> the shard it is registered with, without silent shards."""
        self._silence(now)
        return self._ranks.replica(replica, self._live())

    def shards(self) -> list[str]:
        """Return the shards that it knows."""
        return list(self._heard)

    def targets(self, now: float) -> list[str]:
        """Return the shards that blocks may be brought to for later: their nodes stay."""
        self._silence(now)
        return sorted(self._live() - self._leaving)

    def status(self, now: float) -> dict[str, Any]:
        """Return figures for people."""
        self._silence(now)
        entries, keys = self.index.entries(), len(self.index)
        return {
            "keys": keys,
            "entries": sum(entries.values()),
            "bytes": self.index.num_bytes,
            "bytes_per_key": round(self.index.num_bytes / max(1, keys), 1),
            "queries": self._num_queries,
            "queried_blocks": self._num_queried,
            "resyncs": self._num_resyncs,
            "ranks": len(self._ranks),
            "silent": sorted(self._silent),
            "leaving": sorted(self._leaving),
            "shards": {
                shard: {"entries": entries.get(shard, 0), "heard_s_ago": round(now - at, 3)}
                for shard, at in sorted(self._heard.items())
            },
        }

    def _count(self, keys: bytes) -> None:
        self._num_queries += 1
        self._num_queried += len(keys) // KEY_BYTES

    def _silence(self, now: float) -> None:
        """Leave out the shards whose polls are unanswered for too long."""
        # A shard may keep a poll for as long as the pace allows.
        silent_s = self._silent_s + 3 * self.pace_s
        while self._unanswered and now - next(iter(self._unanswered.values())) > silent_s:
            shard, _ = self._unanswered.popitem(last=False)
            if shard in self._heard:
                self._silent.add(shard)
                self.index.set_silent(shard, True)
