"""A lookup that restarts in a tier of many shards is told everything, whatever that takes.

First in a time that is counted, then with threads.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace

import numpy as np
import pytest

from kvray.actors.lookup.lookup import CALLS_PER_S, Announcement, Answer, Lookup
from kvray.actors.shard import announcer as stream_module
from kvray.actors.shard.announcer import Announcer
from tests.unit.actors.lookup_scale import (
    KEY_S,
    FullTier,
    Idle,
    Tier,
    announcer_of,
    counted_time,
    is_in_step,
)

SHARED_KEY_S = 225e-6
"""What a key takes that 8 to 50 shards hold."""


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
    num_shards, num_keys, key_s
):
    limit_s = 2 * num_shards * num_keys * key_s + 5
    with counted_time() as clock:
        tier = Tier(clock, num_shards=num_shards, num_keys=num_keys, key_s=key_s)
        assert tier.run_until_told(limit_s) < limit_s, f"{tier.num_in_step} in step"
    assert tier.num_taken == num_shards * num_keys, "nothing is said twice"


def test_a_partition_that_restarts_is_told_its_share_and_nothing_is_said_to_the_others():
    with counted_time() as clock:
        tier = Tier(clock, num_shards=60, num_keys=4_000, key_s=KEY_S, num_partitions=4)
        assert tier.run_until_told(30.0) < 30
        assert tier.num_taken == 60 * 4_000
        others = [one.index.num_taken for one in tier.partitions[1:]]
        tier.restart(0)
        assert tier.run_until_told(30.0) < 30
    assert tier.partitions[0].index.num_taken == 60 * 1_000
    assert [one.index.num_taken for one in tier.partitions[1:]] == others


def test_partitions_share_the_time_that_a_restart_takes():
    took = []
    for num_partitions in (1, 4):
        with counted_time() as clock:
            tier = Tier(
                clock,
                num_shards=100,
                num_keys=32_000,
                key_s=KEY_S,
                num_partitions=num_partitions,
            )
            took.append(tier.run_until_told(60.0))
    assert took[1] < took[0] / 2


def test_however_many_shards_there_are_their_calls_leave_time_for_queries():
    with counted_time() as clock:
        tier = Tier(clock, num_shards=1000, num_keys=10, key_s=KEY_S)
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
    monkeypatch.setattr(stream_module, "_FIRST_MAX", 100)
    random = np.random.default_rng(0)
    shelves = {f"s{n}": random.integers(1, 2**63, (2000, 4), dtype="<u8") for n in range(40)}
    line = OneAtATime(key_s=10e-6, wait_s=0.005)
    announcers = [
        announcer_of(shard, FullTier(keys), line.announce) for shard, keys in shelves.items()
    ]
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
