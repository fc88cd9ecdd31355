"""Many shards that announce to a lookup of some partitions, in a time that is counted.

Real announcers and real lookups. Calls of a partition wait in one line, as they do before Ray's
actor, and each takes what it took when it was measured on an actor's CPU.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from kvray.actors.lookup.lookup import Announcement, Answer, Lookup
from kvray.actors.shard import announcer as announcer_module
from kvray.actors.shard import announcer as stream_module
from kvray.actors.shard.announcer import Announcer, Entries
from kvray.index import PARTS_MAX

CALL_S = 0.0005
"""A call of the lookup that brings nothing: its serialization, Ray's part included."""
BATCH_S = 0.0006
"""What it takes longer if it brings any keys, beside these."""
KEY_S = 0.85e-6
"""What a key takes: 6,000 in a call 0.96 to 1.01 us, 20,000 0.83 to 0.90 us."""
ANNOUNCE_S, HEARTBEAT_S = 0.05, 0.5
"""A shard's pauses; see `shard.announce_s` and `shard.heartbeat_s`."""


class Clock:
    """The time that counts; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the seconds since some time."""
        return self.now

    time = monotonic


@contextmanager
def counted_time() -> Iterator[Clock]:
    """Have announcers go by the clock that it yields; the same happens each time."""
    clock = Clock()
    with (
        patch.object(announcer_module, "time", clock),
        patch.object(stream_module, "time", clock),
    ):
        yield clock


class CountingIndex:
    """Counts keys in place of an index, of which the time is known."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.num_taken = 0

    def restart(self, shard: str) -> None:
        """Forget what it counted."""
        self.keys[shard] = 0

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        """Count keys."""
        self.keys[shard] += len(parts)
        self.num_taken += len(keys) // 32

    def remove(self, shard: str, keys: bytes, parts: Sequence[int]) -> list[Any]:
        """Nothing leaves a full tier."""
        return []

    def purge(self, slots_max: int) -> list[Any]:
        """Nothing is left over."""
        return []

    def settle(self, shard: str) -> None:
        """Nothing is left over."""

    def set_silent(self, shard: str, is_silent: bool) -> None:
        """Nobody asks."""

    def entries(self) -> Counter[str]:
        """Return shard -> what it counted."""
        return self.keys


class Alike(Entries):
    """Blocks with one key: any number of them takes no memory."""

    def chosen(self, mask: np.ndarray[Any, Any]) -> Entries:
        """See `Entries.chosen`."""
        count = np.count_nonzero(mask)
        return Entries(keys=self.keys[:count], parts=self.parts[:count], heads=self.heads[:count])


class FullTier:
    """A tier that holds so many blocks, and keeps them."""

    num_held = np.zeros(PARTS_MAX, dtype=np.int64)

    def __init__(
        self, keys: np.ndarray[Any, Any], heads: np.ndarray[Any, Any] | None = None
    ) -> None:
        nothing = np.zeros(len(keys), dtype=np.uint32)
        heads = nothing if heads is None else heads
        kind = Entries if keys.strides[0] else Alike
        self._entries = kind(keys=keys, parts=nothing, heads=heads)

    def collect(self) -> None:
        """Return that nothing has changed."""

    def held(self) -> Entries:
        """Return all blocks."""
        return self._entries


class Idle:
    """The owner of an arena in which nothing changes."""

    def __init__(self, shard: str) -> None:
        self.arena = SimpleNamespace(arena_id=shard)

    def give_up(self, partial_keys: bytes, parts: list[int]) -> None:
        """Nothing is partial."""
        assert partial_keys == b""


def announcer_of(shard: str, tier: FullTier, *lookups: Any) -> Announcer:
    """Return the announcer of a shard that holds the blocks of `tier`."""
    made = Announcer(shard, *lookups)
    made._arena_id = shard
    made._start_over()
    made._deltas = [tier]  # type: ignore[list-item]
    return made


def is_in_step(announcer: Announcer) -> bool:
    """Return whether all partitions have answered, and know all of this shard."""
    return (
        all(stream.num_shards for stream in announcer._streams)
        and not (announcer.status()["lag_s"])
    )


@dataclass(slots=True)
class Waiting:
    """An announcement whose answer is known before its time."""

    announcement: Announcement
    done_at: float
    answer: Answer


class Partition:
    """One partition of the lookup, and the line of calls before it."""

    def __init__(self, clock: Clock, *, key_s: float) -> None:
        self.lookup = Lookup()
        index: Any = CountingIndex()
        self.index = self.lookup.index = index
        self.num_calls = 0
        self.waiting: dict[str, Waiting] = {}
        """Shard -> its announcement."""
        self._clock, self._key_s = clock, key_s
        self._free_at = clock.now

    def announce(self, announcement: Announcement) -> Answer | None:
        """Return the answer if it is time for it."""
        shard, now = announcement.shard, self._clock.now
        waiting = self.waiting.get(shard)
        if waiting is None or waiting.announcement is not announcement:
            # Whoever waits before it in the line goes first: when it is done is known at once.
            began_at = max(now, self._free_at)
            before = self.index.num_taken
            answer = self.lookup.announce(announcement, began_at)
            num_taken = self.index.num_taken - before
            took_s = CALL_S + (BATCH_S if num_taken else 0.0) + self._key_s * num_taken
            self._free_at = began_at + took_s
            self.num_calls += 1
            waiting = Waiting(announcement, self._free_at, replace(answer, took_s=took_s))
            self.waiting[shard] = waiting
        if waiting.done_at > now:
            return None
        del self.waiting[shard]
        return waiting.answer

    def restart(self) -> None:
        """Start again with nothing; calls under way are answered by the one before."""
        self.lookup = Lookup()
        self.index = self.lookup.index = type(self.index)()


class Tier:
    """Shards that announce to the partitions of a lookup, in the clock's time."""

    def __init__(
        self,
        clock: Clock,
        *,
        num_shards: int,
        num_keys: int,
        key_s: float,
        num_partitions: int = 1,
    ) -> None:
        """Have the lookup just started; a key takes it `key_s`."""
        self._clock = clock
        self._num_shards, self._num_keys = num_shards, num_keys
        self.partitions = [Partition(clock, key_s=key_s) for _ in range(num_partitions)]
        # One key many times costs no memory, and is counted as often.
        same = np.broadcast_to(np.zeros(4, dtype="<u8"), (num_keys, 4))
        heads = np.arange(1, num_keys + 1, dtype=np.uint32)
        self._shards: dict[str, tuple[Announcer, Idle]] = {}
        for shard in (f"s{n}" for n in range(num_shards)):
            lines = [partial(self._announce, one) for one in self.partitions]
            made_of = announcer_of(shard, FullTier(same, heads), *lines)
            self._shards[shard] = made_of, Idle(shard)
        self._in_step: set[str] = set()
        self._heartbeat_at = {
            shard: clock.now + HEARTBEAT_S * n / num_shards for n, shard in enumerate(self._shards)
        }
        self._due = [(at, shard) for shard, at in self._heartbeat_at.items()]

    @property
    def num_in_step(self) -> int:
        """Shards whose last answers said that the lookup has all of them."""
        return len(self._in_step)

    @property
    def num_taken(self) -> int:
        """Keys that all partitions took."""
        return sum(one.index.num_taken for one in self.partitions)

    @property
    def is_told(self) -> bool:
        """Whether the lookup has all, and every shard knows that."""
        if len(self._in_step) < self._num_shards:
            return False
        told = sum((Counter(one.index.entries()) for one in self.partitions), Counter[str]())
        return len(told) == self._num_shards and set(told.values()) == {self._num_keys}

    def restart(self, partition: int) -> None:
        """Have one partition lose all that it knew."""
        self.partitions[partition].restart()
        self._in_step.clear()

    def run_until_told(self, limit_s: float) -> float:
        """Return the seconds until the lookup knows all; or `limit_s`, when it gives up."""
        began = self._clock.now
        while not self.is_told and self._due[0][0] < began + limit_s:
            self._step()
        return self._clock.now - began if self.is_told else limit_s

    def run(self, for_s: float) -> None:
        """Go on for so many seconds."""
        until = self._clock.now + for_s
        while self._due[0][0] < until:
            self._step()

    def _step(self) -> None:
        """Have the next shard do what a shard does in one round."""
        now, shard = heapq.heappop(self._due)
        self._clock.now = now
        announcer, owner = self._shards[shard]
        is_eager = announcer.collect(owner)  # type: ignore[arg-type]
        is_due = now >= self._heartbeat_at[shard]
        if is_due:
            self._heartbeat_at[shard] = now + HEARTBEAT_S
        if is_eager or is_due:
            announcer.send(1, is_due=is_due)
        (self._in_step.add if is_in_step(announcer) else self._in_step.discard)(shard)
        heapq.heappush(self._due, (self._next_at(shard, now), shard))

    def _next_at(self, shard: str, now: float) -> float:
        """Return the first of the shard's rounds in which anything can happen."""
        answers = [one.waiting[shard].done_at for one in self.partitions if shard in one.waiting]
        announcer, _ = self._shards[shard]
        turns = [
            stream._send_at
            for stream in announcer._streams
            if stream._under_way is None and (stream._pending or stream._lookup_epoch is None)
        ]
        first = min([self._heartbeat_at[shard], *answers, *turns])
        rounds = max(1, -int(-(first - now) // ANNOUNCE_S))
        return now + rounds * ANNOUNCE_S

    @staticmethod
    def _announce(partition: Partition, announcement: Announcement) -> Answer | None:
        return partition.announce(announcement)
