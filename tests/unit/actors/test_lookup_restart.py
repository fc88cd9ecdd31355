"""A lookup that restarts in a tier of many shards is told everything, whatever that takes.

Real announcers and a real lookup, in a time that is counted: calls wait in one line, as they do
before Ray's actor, and each takes what it took when it was measured.
"""

import heapq
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvray.actors.lookup.lookup import Announcement, Answer, Lookup
from kvray.actors.shard import announcer as announcer_module
from kvray.actors.shard.announcer import Announcer
from kvray.actors.shard.tier_delta import Entries
from kvray.index import PARTS_MAX

CALL_S = 0.0005
"""A call of the lookup, whatever it is for."""
KEY_S = 27e-3 / 16_000
"""What one of 150 shards took for each of its 16,000 keys, Ray's part included."""
SHARED_KEY_S = 225e-6
"""What a key takes that 8 to 50 shards hold."""
WAIT_S = 2.0
"""How long a shard's thread waits before it has something else to do."""
ANNOUNCE_S, HEARTBEAT_S = 0.05, 0.5


class Clock:
    """The time that counts."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class CountingIndex:
    """Counts keys in place of an index, of which the time is known."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.num_taken = 0

    def restart(self, shard: str) -> None:
        self.keys[shard] = 0

    def add(self, shard: str, keys: bytes, parts: list[int]) -> None:
        assert len(keys) == 32 * len(parts)
        self.keys[shard] += len(parts)
        self.num_taken += len(parts)

    def remove(self, shard: str, keys: bytes, parts: list[int]) -> list[Any]:
        return []

    def purge(self, slots_max: int) -> list[Any]:
        return []

    def settle(self, shard: str) -> None:
        pass

    def set_silent(self, shard: str, is_silent: bool) -> None:
        pass


class FullTier:
    """A tier that holds so many blocks, and keeps them."""

    num_held = np.zeros(PARTS_MAX, dtype=np.int64)

    def __init__(self, keys: np.ndarray[Any, Any]) -> None:
        self._keys = keys

    def collect(self) -> None:
        return None

    def held(self) -> Entries:
        return Entries(keys=self._keys, parts=np.zeros(len(self._keys), dtype=np.uint32))


class Idle:
    """The owner of an arena in which nothing changes."""

    def __init__(self, shard: str) -> None:
        self.arena = SimpleNamespace(arena_id=shard)

    def give_up(self, partial_keys: bytes, parts: list[int]) -> None:
        assert partial_keys == b""


def announcer_of(shard: str, keys: np.ndarray[Any, Any], announce: Any) -> Announcer:
    made = Announcer(shard, announce)
    made._arena_id = shard
    made._deltas = [FullTier(keys)]  # type: ignore[list-item]
    return made


def is_in_step(announcer: Announcer) -> bool:
    return bool(announcer.num_shards) and not announcer.status()["lag_s"]


class Tier:
    """Shards that announce to one lookup, in the clock's time."""

    def __init__(self, clock: Clock, *, num_shards: int, num_keys: int, key_s: float) -> None:
        self.clock = clock
        self.lookup = Lookup()
        self.index = self.lookup.index = CountingIndex()  # type: ignore[assignment]
        self.num_shards, self.num_keys, self.key_s = num_shards, num_keys, key_s
        self.free_at = clock.now
        self.answers: dict[str, tuple[Announcement, float, Answer]] = {}
        keys = np.zeros((num_keys, 4), dtype="<u8")
        self.announcers = {
            f"s{n}": announcer_of(f"s{n}", keys, self.announce) for n in range(num_shards)
        }

    def announce(self, announcement: Announcement) -> Answer | None:
        """Wait for the answer as a shard does; the clock goes on meanwhile."""
        shard, began = announcement.shard, self.clock.now
        waited_for = self.answers.get(shard)
        if waited_for is None or waited_for[0] is not announcement:
            # Whoever waits before it in the line goes first: when it is done is known at once.
            began_at = max(began, self.free_at)
            before = self.index.num_taken
            answer = self.lookup.announce(announcement, began_at)
            took_s = CALL_S + self.key_s * (self.index.num_taken - before)
            self.free_at = began_at + took_s
            waited_for = announcement, self.free_at, replace(answer, took_s=took_s)
            self.answers[shard] = waited_for
        _, done_at, answer = waited_for
        if done_at > began + WAIT_S:
            self.clock.now = began + WAIT_S
            return None
        self.clock.now = max(began, done_at)
        return answer

    def is_told(self) -> bool:
        """Whether it has all, and every shard knows that."""
        keys = self.index.keys
        return (
            len(keys) == self.num_shards
            and set(keys.values()) == {self.num_keys}
            and all(map(is_in_step, self.announcers.values()))
        )

    def run(self, for_s: float) -> None:
        """Have all shards announce until the lookup knows all; fail after `for_s`."""
        began = self.clock.now
        due = [
            (began + HEARTBEAT_S * n / self.num_shards, s) for n, s in enumerate(self.announcers)
        ]
        heapq.heapify(due)
        while not self.is_told():
            at, shard = heapq.heappop(due)
            in_step = sum(map(is_in_step, self.announcers.values()))
            assert at < began + for_s, f"{in_step} in step, {self.free_at - at:.0f} s to be done"
            self.clock.now = at
            announcer = self.announcers[shard]
            announcer.collect(Idle(shard))  # type: ignore[arg-type]
            announcer.send(1)
            goes_on = announcer.collect(Idle(shard))  # type: ignore[arg-type]
            pause_s = ANNOUNCE_S if goes_on else HEARTBEAT_S
            heapq.heappush(due, (max(self.clock.now, at + pause_s), shard))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(announcer_module, "time", made)
    return made


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
    clock: Clock, num_shards: int, num_keys: int, key_s: float
) -> None:
    tier = Tier(clock, num_shards=num_shards, num_keys=num_keys, key_s=key_s)
    work_s = num_shards * num_keys * key_s
    tier.run(2 * work_s + 5)
    assert tier.index.num_taken == num_shards * num_keys, "nothing is said twice"


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
            time.sleep(self._key_s * len(announcement.added_parts))
        return replace(answer, took_s=time.monotonic() - began)

    def close(self) -> None:
        self._calls.shutdown()


def test_threads_that_announce_to_a_slow_lookup_are_all_in_step_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer_module, "_FIRST_MAX", 100)
    random = np.random.default_rng(0)
    shelves = {f"s{n}": random.integers(1, 2**63, (2000, 4), dtype="<u8") for n in range(40)}
    line = OneAtATime(key_s=10e-6, wait_s=0.005)
    announcers = [announcer_of(shard, keys, line.announce) for shard, keys in shelves.items()]
    deadline = time.monotonic() + 30

    def live(shard: str, announcer: Announcer) -> None:
        while not is_in_step(announcer) and time.monotonic() < deadline:
            announcer.collect(Idle(shard))  # type: ignore[arg-type]
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
