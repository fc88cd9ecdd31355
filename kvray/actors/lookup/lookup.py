"""The lookup: knows which shards hold which blocks, from their announcements.

It also knows which rank is registered with which shard, deals out turns to announce everything (a
few shards at a time), and tells shards of parts that are useless without those of other nodes.
"""

import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES
from kvray.index import Index, Loss, Match, Run

QUEUED_MAX = 65_536  # keys queued for one shard; the oldest of more are dropped

HANDED_MAX = 4096  # keys in one answer


class PartialBlocks:
    """The queue of each shard; it is advice, so a lost answer does no harm."""

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


TURNS = 32
"""Shards at once: while some make their next pieces, the lookup works on those of others. The turn
of a shard with few blocks takes some 0.15 s, most of it pauses."""
TURN_S = 5.0
"""A turn ends after so long a silence of its shard, which may have died."""
_ASKS_PER_S = 200
"""Requests for a turn by all shards together, however many wait: a small load for the lookup."""
_WAIT_MIN_S = 0.5


class Turns:
    """The turns that the lookup gives; pure. Without turns all shards would announce at once."""

    def __init__(self) -> None:
        # Shard -> when its turn runs out.
        self._taken: dict[str, float] = {}
        # When the last of those that wait is to ask.
        self._last_ask = float("-inf")

    def take(self, shard: str, now: float) -> float:
        """Give `shard` a turn if one is free; return 0, or the seconds until it is to ask again."""
        wait_s = self.wait_s(shard, now)
        if not wait_s:
            self._taken[shard] = now + TURN_S
        return wait_s

    def wait_s(self, shard: str, now: float) -> float:
        """Return the seconds until `shard` is to ask, one shard after the other; 0: at once."""
        self._taken = {one: until for one, until in self._taken.items() if until > now}
        if shard in self._taken or len(self._taken) < TURNS:
            return 0.0
        self._last_ask = max(self._last_ask + 1 / _ASKS_PER_S, now + _WAIT_MIN_S)
        return self._last_ask - now

    def go_on(self, shard: str, now: float, *, more: bool) -> None:
        """Note an announcement of `shard`, and whether `more` of it follows."""
        if not more:
            self._taken.pop(shard, None)
        elif shard in self._taken:
            self._taken[shard] = now + TURN_S


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


Array = npt.NDArray[Any]

SILENT_S = 1.5
"""Answers leave out a shard after so long a silence: three of its heartbeats."""
CALLS_PER_S = 400
"""Announcements and heartbeats of all shards together: a fifth of what one Ray actor takes."""
_SHARDS_UNPACED = 20
"""So few shards announce as often as they like."""

_PART = np.dtype("<u2")
_PURGED_SLOTS = 100_000
"""Slots of the index that one announcement purges: some milliseconds of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The blocks that came to one shard or left it since its last announcement."""

    shard: str
    arena_id: str
    """A new arena counts its epochs from 1 again."""
    shard_epoch: int
    sequence: int
    """One more than in the announcement before, whatever happened to that one."""
    full: bool
    """It lists all blocks of the shard, or the first of them, instead of changes."""
    added_keys: bytes
    added_parts: bytes
    """One for each key, as `packed_parts` makes them: lists would cost as much as the index."""
    removed_keys: bytes
    removed_parts: bytes
    more: bool = False
    """The list did not fit in; the next announcement continues it."""
    ranks: list[tuple[str, int]] | None = None
    """Replica and rank of all ranks registered with the shard; None: no change."""
    namespaces: tuple[int, ...] = ()
    """With `ranks`: the namespaces, as arenas number them, of its blocks and engines."""
    is_leaving: bool = False
    """The shard's node is to go: nothing is to be brought there for later."""
    until: tuple[str, float] | None = None
    """A lookup's epoch, and the time by its clock (`Answer.now_s`) at which the shard gives up."""

    @property
    def num_entries(self) -> int:
        """Blocks that came, and those that left."""
        return (len(self.added_keys) + len(self.removed_keys)) // KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The lookup's answer to an announcement."""

    lookup_epoch: str
    """New at each start of the lookup; a shard then announces everything."""
    resync: bool
    """The announcement did not follow the last one, and the lookup ignored it."""
    wait_s: float = 0.0
    """With `resync`: when the shard is to ask for its turn to announce everything."""
    pause_s: float = 0.0
    """Without `resync`: how long the shard is to say nothing, once it has said what it knows."""
    now_s: float = 0.0
    """The time of the answer, by the lookup's clock."""
    took_s: float = 0.0
    """How long the lookup worked on it; 0: not known."""
    num_shards: int = 0
    """Shards that the lookup heard lately, the asking one included."""
    partial_keys: bytes = b""
    """Keys of partial blocks, end to end: their parts at the shard are useless."""
    namespaces: tuple[int, ...] = ()
    """Those of all shards."""


def packed_parts(parts: Sequence[int] | Array) -> bytes:
    """Return parts, all below PARTS_MAX, as little-endian u16, end to end."""
    return np.asarray(parts, dtype=_PART).tobytes()


def _unpacked(parts: bytes) -> Array:
    if len(parts) % _PART.itemsize:
        raise ConfigError(f"{len(parts)} bytes are no whole number of parts.")
    return np.frombuffer(parts, dtype=_PART)


class Lookup:
    """Keeps the index in step with announcements.

    A shard numbers its announcements within its epoch and uses no number twice. The lookup refuses
    one that does not follow the last, with `resync`. The shard then sends a full one, which counts
    unless the lookup took a later one. So lost, repeated or reordered announcements do no harm. If
    a full announcement is too long for one message, the next ones add the rest.

    After a start of the lookup every shard has to announce everything. Only shards with a turn
    begin, and the answers to the others cost next to nothing. So the time until the index is
    complete depends on the number of blocks, and not on the number of shards.

    The more shards there are, the less often each may announce anything: the calls of all of them
    are few enough to leave the lookup time for queries.

    Answers leave out a shard after a long silence, until its next announcement. It still holds its
    blocks, until it says otherwise or is dropped.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.index = Index()
        self._silent_s = silent_s
        self._ranks = RankDirectory()
        self._partial_blocks = PartialBlocks()
        self._namespaces: dict[str, tuple[int, ...]] = {}
        # Of all shards; put together when one changes, as hundreds of answers a second carry it.
        self._all_namespaces: tuple[int, ...] = ()
        self.epoch = secrets.token_hex(8)
        self._turns = Turns()
        self._num_resyncs = self._num_queries = self._num_queried = self._num_expired = 0
        self._last: dict[str, tuple[str, int, int]] = {}
        # When each was heard, the oldest first: a call visits only those that fall silent.
        self._live: OrderedDict[str, float] = OrderedDict()
        self._silent: dict[str, float] = {}
        self._leaving: set[str] = set()

    def announce(self, announcement: Announcement, now: float) -> Answer:
        """Take an announcement or a heartbeat; ConfigError: its keys and parts do not match."""
        shard = announcement.shard
        epoch, until = announcement.until or ("", 0.0)
        if epoch == self.epoch and now > until:
            self._num_expired += 1
            return self._refusal(shard, now, wait_s=0.0)
        if not self._follows(announcement):
            self._num_resyncs += 1
            return self._refusal(shard, now, wait_s=self._turns.wait_s(shard, now))
        if announcement.full and announcement.more:
            wait_s = self._turns.take(shard, now)
            if wait_s:
                return self._refusal(shard, now, wait_s=wait_s)
        # An error below leaves no sequence: nothing may build on half an announcement.
        last = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        self._last.pop(shard, None)
        self._take(announcement)
        self._last[shard] = last
        self._silent.pop(shard, None)
        self._live[shard] = now
        self._live.move_to_end(shard)
        self._leaving.discard(shard)
        if announcement.is_leaving:
            self._leaving.add(shard)
        self._silence(now)
        self._turns.go_on(shard, now, more=announcement.more)
        return Answer(
            lookup_epoch=self.epoch,
            resync=False,
            now_s=now,
            pause_s=self.pause_s,
            num_shards=len(self._live),
            partial_keys=self._partial_blocks.take(shard, self.index),
            namespaces=self._all_namespaces,
        )

    @property
    def pause_s(self) -> float:
        """Time between two announcements of a shard; 0: as it likes."""
        return max(0, len(self._live) + len(self._silent) - _SHARDS_UNPACED) / CALLS_PER_S

    def _refusal(self, shard: str, now: float, *, wait_s: float) -> Answer:
        self._silence(now)
        return Answer(
            lookup_epoch=self.epoch,
            resync=True,
            wait_s=wait_s,
            now_s=now,
            num_shards=len(self._live) + (shard not in self._live),
        )

    def _take(self, announcement: Announcement) -> None:
        shard, index = announcement.shard, self.index
        if announcement.ranks is not None:
            self._ranks.name(shard, announcement.ranks)
            self._name_namespaces(shard, announcement.namespaces)
        if announcement.full:
            index.restart(shard)
        removed_parts = _unpacked(announcement.removed_parts)
        added_parts = _unpacked(announcement.added_parts)
        removed = index.remove(shard, announcement.removed_keys, removed_parts)
        index.add(shard, announcement.added_keys, added_parts)
        index.set_silent(shard, False)
        if not announcement.more:
            index.settle(shard)
        self._partial_blocks.note(removed + index.purge(_PURGED_SLOTS))

    def _name_namespaces(self, shard: str, namespaces: tuple[int, ...]) -> None:
        if namespaces == self._namespaces.get(shard, ()):
            return
        self._namespaces[shard] = namespaces
        if not namespaces:
            del self._namespaces[shard]
        self._all_namespaces = tuple(set(chain.from_iterable(self._namespaces.values())))

    def _follows(self, announcement: Announcement) -> bool:
        """Return whether the announcement follows the last one of its shard."""
        here = announcement.arena_id, announcement.shard_epoch, announcement.sequence
        arena_id, epoch, sequence = self._last.get(announcement.shard, ("", -1, -1))
        if announcement.full:
            return here[0] != arena_id or here[1:] > (epoch, sequence)
        return here == (arena_id, epoch, sequence + 1)

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
        return self._ranks.replica(replica, self._live)

    def shards(self) -> list[str]:
        """Return the shards that it knows."""
        return [*self._silent, *self._live]

    def targets(self, now: float) -> list[str]:
        """Return the shards that blocks may be brought to for later: their nodes stay."""
        self._silence(now)
        return [shard for shard in self._live if shard not in self._leaving]

    def drop(self, shard: str) -> None:
        """Forget a shard whose node is gone."""
        self._leaving.discard(shard)
        self.index.drop(shard)
        self._ranks.drop(shard)
        self._name_namespaces(shard, ())
        self._partial_blocks.drop(shard)
        self._last.pop(shard, None)
        self._live.pop(shard, None)
        self._silent.pop(shard, None)

    def status(self, now: float) -> dict[str, Any]:
        """Return figures for people."""
        self._silence(now)
        entries, keys = self.index.entries(), len(self.index)
        return {
            "epoch": self.epoch,
            "keys": keys,
            "entries": sum(entries.values()),
            "bytes": self.index.num_bytes,
            "bytes_per_key": round(self.index.num_bytes / max(1, keys), 1),
            "queries": self._num_queries,
            "queried_blocks": self._num_queried,
            "resyncs": self._num_resyncs,
            "expired": self._num_expired,
            "ranks": len(self._ranks),
            "silent": sorted(self._silent),
            "leaving": sorted(self._leaving),
            "shards": {
                shard: {"entries": entries.get(shard, 0), "heard_s_ago": round(now - at, 3)}
                for shard, at in sorted((self._silent | self._live).items())
            },
        }

    def _count(self, keys: bytes) -> None:
        self._num_queries += 1
        self._num_queried += len(keys) // KEY_BYTES

    def _silence(self, now: float) -> None:
        """Leave out the shards that were not heard lately."""
        # A shard that pauses is not silent yet.
        silent_s = self._silent_s + 3 * self.pause_s
        while self._live and now - next(iter(self._live.values())) > silent_s:
            shard, at = self._live.popitem(last=False)
            self._silent[shard] = at
            self.index.set_silent(shard, True)
