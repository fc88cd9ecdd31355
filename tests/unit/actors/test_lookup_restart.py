"""A lookup that restarts in a tier of many shards is told everything, whatever that takes.

First in a time that is counted: real announcers and real lookups, whose calls wait in one line, as
they do before Ray's actor, and take what they took on an actor's CPU. Then in threads.
"""

import heapq
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvray.actors.lookup.lookup import CALLS_PER_S, Announcement, Answer, Lookup
from kvray.actors.shard import announcer as announcer_module
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
SHARED_KEY_S = 225e-6
"""What a key takes that 8 to 50 shards hold."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time `now` that announcers go by; the same happens each time."""
    made = SimpleNamespace(now=1000.0)
    made.monotonic = made.time = lambda: made.now
    monkeypatch.setattr(announcer_module, "time", made)
    return made


class CountingIndex:
    """Counts keys in place of an index, of which the time is known."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.num_taken = 0

    def restart(self, shard: str) -> None:
        self.keys[shard] = 0

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        self.keys[shard] += len(parts)
        self.num_taken += len(keys) // 32

    def entries(self) -> Counter[str]:
        return self.keys

    def _nothing(self, *_: Any) -> list[Any]:
        """Nothing leaves a full tier or is left over, and nobody asks."""
        return []

    remove = purge = settle = set_silent = _nothing


class Alike(Entries):
    """Blocks with one key: any number of them takes no memory."""

    def chosen(self, mask: np.ndarray[Any, Any]) -> Entries:
        count = np.count_nonzero(mask)
        return Entries(keys=self.keys[:count], parts=self.parts[:count], heads=self.heads[:count])


class FullTier:
    """A tier that holds so many blocks, and keeps them."""

    num_held = np.zeros(PARTS_MAX, dtype=np.int64)

    def __init__(
        self, keys: np.ndarray[Any, Any], heads: np.ndarray[Any, Any] | None = None
    ) -> None:
        nothing = np.zeros(len(keys), dtype=np.uint32)
        kind = Entries if keys.strides[0] else Alike
        self._entries = kind(keys=keys, parts=nothing, heads=nothing if heads is None else heads)

    def collect(self) -> None:
        """Return that nothing has changed."""

    def held(self) -> Entries:
        return self._entries


class Idle:
    """The owner of an arena in which nothing changes."""

    def __init__(self, shard: str) -> None:
        self.arena = SimpleNamespace(arena_id=shard)

    def give_up(self, partial_keys: bytes, parts: list[int]) -> None:
        assert partial_keys == b"", "nothing is partial"


def announcer_of(shard: str, tier: FullTier, *lookups: Any) -> Announcer:
    """Return the announcer of a shard that holds the blocks of `tier`."""
    made = Announcer(shard, *lookups)
    made._arena_id = shard
    made._start_over()
    made._deltas = [tier]
    return made


def is_in_step(announcer: Announcer) -> bool:
    """Return whether all partitions have answered, and know all of this shard."""
    are_known = all(stream.num_shards for stream in announcer._streams)
    return are_known and not announcer.status()["lag_s"]


@dataclass(slots=True)
class Waiting:
    """An announcement whose answer is known before its time."""

    announcement: Announcement
    done_at: float
    answer: Answer


class Partition:
    """One partition of the lookup, and the line of calls before it."""

    def __init__(self, clock: SimpleNamespace, *, key_s: float) -> None:
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
        clock: SimpleNamespace,
        num_shards: int,
        num_keys: int,
        key_s: float = KEY_S,
        partitions: int = 1,
    ) -> None:
        """Have the lookup just started; a key takes it `key_s`."""
        self._clock = clock
        self._num_shards, self._num_keys = num_shards, num_keys
        self.partitions = [Partition(clock, key_s=key_s) for _ in range(partitions)]
        # One key many times costs no memory, and is counted as often.
        same = np.broadcast_to(np.zeros(4, dtype="<u8"), (num_keys, 4))
        heads = np.arange(1, num_keys + 1, dtype=np.uint32)
        self._shards: dict[str, tuple[Announcer, Idle]] = {}
        for shard in (f"s{n}" for n in range(num_shards)):
            lines = [one.announce for one in self.partitions]
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
        is_eager = announcer.collect(owner)
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


@pytest.mark.parametrize(
    ("num_shards", "num_keys", "key_s"),
    [
        (150, 16_000, KEY_S),
        (300, 16_000, KEY_S),
        (100, 4_000, SHARED_KEY_S),
        pytest.param(1000, 16_000, KEY_S, marks=pytest.mark.long),
        pytest.param(300, 131_000, KEY_S, marks=pytest.mark.long),
    ],
)
def test_a_restarted_lookup_is_told_all_in_a_time_that_the_work_asks_for(
    clock, num_shards, num_keys, key_s
):
    limit_s = 2 * num_shards * num_keys * key_s + 5
    tier = Tier(clock, num_shards, num_keys, key_s)
    assert tier.run_until_told(limit_s) < limit_s, f"{tier.num_in_step} in step"
    assert tier.num_taken == num_shards * num_keys, "nothing is said twice"


def test_a_partition_that_restarts_is_told_its_share_and_nothing_is_said_to_the_others(clock):
    tier = Tier(clock, 60, 4_000, partitions=4)
    assert tier.run_until_told(30.0) < 30
    assert tier.num_taken == 60 * 4_000
    others = [one.index.num_taken for one in tier.partitions[1:]]
    tier.restart(0)
    assert tier.run_until_told(30.0) < 30
    assert tier.partitions[0].index.num_taken == 60 * 1_000
    assert [one.index.num_taken for one in tier.partitions[1:]] == others


def test_partitions_share_the_time_that_a_restart_takes(clock):
    one, four = (Tier(clock, 100, 32_000, partitions=n).run_until_told(60.0) for n in (1, 4))
    assert four < one / 2


def test_however_many_shards_there_are_their_calls_leave_time_for_queries(clock):
    tier = Tier(clock, 1000, 10)
    assert tier.run_until_told(30.0) < 30
    tier.run(5)
    before = tier.partitions[0].num_calls
    tier.run(10)
    assert tier.partitions[0].num_calls - before < 1.1 * CALLS_PER_S * 10
    assert tier.num_in_step == 1000


# -- the same with threads, a real index and a real clock ------------------------------------------


class OneAtATime:
    """A lookup that works off calls in their order; whoever calls waits only for a while."""

    def __init__(self, key_s: float, wait_s: float) -> None:
        # A shard whose thread has ended is not silent: it has said everything.
        self.lookup = Lookup(silent_s=3600)
        self._key_s, self._wait_s = key_s, wait_s
        self._calls = ThreadPoolExecutor(max_workers=1)
        self._under_way: dict[str, tuple[Announcement, Future[Answer]]] = {}

    def announce(self, announcement: Announcement) -> Answer | None:
        shard = announcement.shard
        if self._under_way.get(shard, (None, None))[0] is not announcement:
            self._under_way[shard] = announcement, self._calls.submit(self._work, announcement)
        try:
            return self._under_way[shard][1].result(self._wait_s)
        except FutureTimeout:
            return None

    def _work(self, announcement: Announcement) -> Answer:
        began = time.monotonic()
        answer = self.lookup.announce(announcement, began)
        if not answer.resync:
            time.sleep(self._key_s * announcement.num_entries)
        return replace(answer, took_s=time.monotonic() - began)

    def close(self) -> None:
        self._calls.shutdown()


def test_threads_that_announce_to_a_slow_lookup_are_all_in_step_in_the_end(monkeypatch):
    monkeypatch.setattr(announcer_module, "_FIRST_MAX", 100)
    random = np.random.default_rng(0)
    shelves = {f"s{n}": random.integers(1, 2**63, (2000, 4), dtype="<u8") for n in range(40)}
    line = OneAtATime(key_s=10e-6, wait_s=0.005)
    announcers = [
        announcer_of(shard, FullTier(keys), line.announce) for shard, keys in shelves.items()
    ]
    deadline = time.monotonic() + 30

    def live(shard: str, announcer: Announcer) -> None:
        while not is_in_step(announcer) and time.monotonic() < deadline:
            announcer.collect(Idle(shard))
            announcer.send(1)
            time.sleep(0.005)

    threads = [
        threading.Thread(target=live, args=each) for each in zip(shelves, announcers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.close()
    assert all(map(is_in_step, announcers))
    assert line.lookup.index.entries() == dict.fromkeys(shelves, 2000)
    for shard, keys in shelves.items():
        assert line.lookup.index.match(keys.tobytes(), 1).holders == {shard: 2000}
