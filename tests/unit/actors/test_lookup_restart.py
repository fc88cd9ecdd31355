"""A lookup that restarts in a tier of many shards knows everything again, whatever that takes.

Real logs, lookups and followers, in a time that is counted: an event loop whose clock jumps to the
next thing that is due. The lookup's process works on one thing at a time, and takes what it took on
an actor's CPU. The index counts keys, since its time is known.
"""

import asyncio
import pickle
import selectors
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvray.actors.lookup.delta import Delta, Poll
from kvray.actors.lookup.followers import NEWS_MAX, TURNS, Followers
from kvray.actors.lookup.lookup import CALLS_PER_S, Lookup
from kvray.actors.shard.announcer import Announcer, Entries
from kvray.errors import ShardUnavailable
from kvray.index import PARTS_MAX, Run

pytestmark = pytest.mark.anyio

CALL_S = 0.0005
"""A poll that brings nothing: its serialization, Ray's part included."""
BATCH_S = 0.0006
"""What it takes longer if it brings any keys, beside these."""
KEY_S = 0.39e-6
"""What a key takes: 16,000 in a step 0.33 us with the rest of the step, and 0.38 us in an index of
24 million keys."""
SHARED_KEY_S = 225e-6
"""What a key takes that 8 to 50 shards hold."""
WAY_S = 0.0006
"""From the lookup to a shard, and back."""
ANNOUNCE_S, HEARTBEAT_S = 0.05, 0.5
"""A shard's pauses; see `shard.announce_s` and `shard.heartbeat_s`."""


class CountedTime(asyncio.SelectorEventLoop):
    """An event loop in which nothing takes time but what says so by `work`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.worked: deque[tuple[float, float]] = deque(maxlen=50_000)  # beginnings and ends
        self.is_same_round = False
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Take so long, without a pause for others."""
        began = self.worked.pop()[0] if self.is_same_round else self.now
        self.now += seconds
        self.worked.append((began, self.now))
        self.is_same_round = True


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: CountedTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is due any more"
        self._loop.now += max(0.0, timeout)
        self._loop.is_same_round = False
        return super().select(0)


@dataclass
class CountingIndex:
    """Counts keys in place of an index, of which the time is known."""

    loop: CountedTime
    key_s: float
    keys: Counter[str] = field(default_factory=Counter)
    num_taken: int = 0

    def restart(self, shard: str) -> None:
        self.keys[shard] = 0

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        self.keys[shard] += len(parts)
        self.num_taken += len(keys) // 32
        self.loop.work(BATCH_S + self.key_s * len(parts))

    def entries(self) -> Counter[str]:
        return self.keys

    def drop(self, shard: str) -> None:
        del self.keys[shard]

    def locate(self, keys: bytes) -> list[Run]:
        return []

    def _nothing(self, *_: Any) -> list[Any]:
        """Nothing leaves a full tier or is left over."""
        return []

    remove = purge = settle = set_silent = _nothing


def blocks(count: int) -> Entries:
    """Return blocks, of which each partition gets its share."""
    keys, parts = np.zeros((count, 4), dtype="<u8"), np.zeros(count, dtype=np.uint32)
    return Entries(keys=keys, parts=parts, heads=np.arange(1, count + 1, dtype=np.uint32))


class Tier:
    """Shards, and a partition of a lookup that has just started; the machine of each is its own.

    Partitions run side by side and are alike: there is one, and its work is counted.
    """

    def __init__(
        self, num_shards: int, num_keys: int, key_s: float = KEY_S, split: int = 1
    ) -> None:
        """Have so many shards of so many keys, which take so long and are split over partitions."""
        self.loop: Any = asyncio.get_running_loop()
        self.key_s, self._num_partitions = key_s, split
        self.frozen: dict[str, asyncio.Event] = {}
        self.is_supervised = True
        self.freezes_above = -1  # changes that a poll asks for; 0: frozen shards greet
        self.slow: dict[str, float] = {}
        self.under_way: set[str] = set()
        self.num_calls = self._num_listing = self.most_listing = 0
        held, num_held = blocks(num_keys), np.zeros(PARTS_MAX, dtype=np.int64)
        # It keeps what it holds.
        self._full: Any = SimpleNamespace(held=lambda: held, num_held=num_held)
        self.share = -(-num_keys // split)
        """Keys of each shard that the partition is told of."""
        self.shards = {f"s{number}": self.shard() for number in range(num_shards)}
        self.start()

    def shard(self) -> Announcer:
        made = Announcer(self._num_partitions, clock=self.loop.time)
        made._deltas = [self._full]
        return made

    def start(self) -> None:
        """Have the partition start in a process of its own."""
        lookup = Lookup(clock=self.loop.time)
        lookup.index = self.index = CountingIndex(self.loop, self.key_s)  # type: ignore[assignment]
        self.followers = Followers(lookup, self._ask)
        self.task = self.loop.create_task(self.followers.run())

    async def restart(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.start()

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "shard_names":
            if not self.is_supervised:
                raise ShardUnavailable("The supervisor is away.")
            return list(self.shards)
        return await asyncio.wait_for(self._poll(actor, args[0]), timeout_s)

    async def _poll(self, shard: str, poll: Poll) -> Delta:
        self.num_calls += 1
        assert shard not in self.under_way, "one call at a time"
        self.under_way.add(shard)
        is_listing = poll.most not in (0, NEWS_MAX)
        self._num_listing += is_listing
        self.most_listing = max(self.most_listing, self._num_listing)
        try:
            await asyncio.sleep(WAY_S)
            if shard in self.frozen and poll.most > self.freezes_above:
                await self.frozen[shard].wait()
            if shard not in self.shards:
                raise ShardUnavailable(f"There is no {shard}.")
            delta = await self.shards[shard].delta(poll, HEARTBEAT_S)
            delta = pickle.loads(pickle.dumps(delta))  # noqa: S301 - its own
            await asyncio.sleep(WAY_S + self.slow.get(shard, 0.0))
        finally:
            self.under_way.discard(shard)
            self._num_listing -= is_listing
        self.loop.work(CALL_S)
        return delta

    @property
    def is_told(self) -> bool:
        known = self.followers.lookup._shards.values()
        behind = sum(shard.cursor is not None for shard in known)
        num = len(self.shards) - len(self.frozen)
        told = sum(self.index.keys[shard] >= self.share - 1 for shard in self.shards)
        return behind >= num and told >= num

    async def until_told(self, limit_s: float) -> float:
        """Return the seconds until the partition knows all; or `limit_s`, when it gives up."""
        began = self.loop.time()
        while not self.is_told and self.loop.time() < began + limit_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # which costs nothing in a time that is counted
        return self.loop.time() - began


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Have time counted."""
    return "asyncio", {"loop_factory": CountedTime}


@pytest.fixture
async def tier(request: pytest.FixtureRequest) -> Tier:
    return Tier(*request.param)


def of(*asked: Any) -> pytest.MarkDecorator:
    """Give a test such a tier."""
    return pytest.mark.parametrize("tier", [asked], indirect=True)


async def waits_of_queries(tier: Tier, for_s: float) -> list[float]:
    """Return how long each of many queries waits for the step that the lookup works on."""
    began, random = tier.loop.time(), Random(0)
    await asyncio.sleep(for_s)
    asked = [random.uniform(began, began + for_s) for _ in range(5000)]
    steps = [step for step in tier.loop.worked if step[1] > began]
    ends = [end for _, end in steps]
    waits = []
    for at in asked:
        start, end = steps[min(bisect_right(ends, at), len(steps) - 1)]
        waits.append(max(0.0, end - at) if start <= at else 0.0)
    return waits


@pytest.mark.parametrize(
    "tier",
    [
        (150, 16_000, KEY_S, 1),
        (300, 16_000, KEY_S, 4),
        (40, 4_000, SHARED_KEY_S, 1),
        pytest.param((1000, 131_000, KEY_S, 4), marks=pytest.mark.long),
        pytest.param((10_000, 16_000, KEY_S, 1), marks=pytest.mark.long),
    ],
    indirect=True,
)
async def test_a_restarted_lookup_knows_all_in_due_time(tier):
    limit_s = 1.3 * len(tier.shards) * (tier.share * tier.key_s + 10 * CALL_S) + 5
    assert await tier.until_told(limit_s) < limit_s, "in time"
    assert tier.index.num_taken == len(tier.shards) * tier.share, "nothing is said twice"
    assert tier.most_listing == TURNS
    took = [end - began for began, end in tier.loop.worked]
    half = np.percentile(took[len(took) // 2 :], 50)
    assert half < 0.016, "steps are as short as a slow index asks for"
    await tier.restart()
    assert await tier.until_told(limit_s) < limit_s, "in time again"


@of(120, 16_000)
async def test_frozen_and_slow_shards_hold_up_no_other_and_get_one_call(tier):
    thaw = asyncio.Event()
    tier.frozen = {f"s{n}": thaw for n in range(40)}
    tier.slow = {"s50": 1.0}
    assert await tier.until_told(60) < 60
    before = tier.num_calls
    assert all(tier.index.keys[shard] == 0 for shard in tier.frozen)
    assert len(tier.under_way & tier.frozen.keys()) == 40
    assert tier.num_calls == before
    tier.frozen = {}
    thaw.set()
    assert await tier.until_told(120) < 120


@of(100, 16_000)
async def test_shards_that_freeze_with_a_turn_give_it_back(tier):
    tier.frozen = {f"s{n}": asyncio.Event() for n in range(2 * TURNS)}
    tier.freezes_above = 0
    assert await tier.until_told(40) < 40
    assert not any(tier.index.keys[shard] for shard in tier.frozen)


@of(3, 1000)
async def test_a_shard_that_is_gone_is_forgotten_and_another_one_followed(tier):
    assert await tier.until_told(30) < 30
    del tier.shards["s0"]
    tier.shards["new"] = tier.shard()
    await asyncio.sleep(3)
    assert sorted(tier.index.keys) == ["new", "s1", "s2"]
    assert tier.is_told
    tier.shards["s1"] = tier.shards["new"]  # with another log
    before = tier.index.num_taken
    del tier.shards["new"]
    await asyncio.sleep(3)
    assert tier.index.num_taken == before + 1000, "it is told all again"


@of(3, 1000)
async def test_without_a_supervisor_those_are_followed_that_name_themselves(tier):
    assert await tier.until_told(30) < 30
    tier.is_supervised = False
    await asyncio.sleep(10)
    assert tier.is_told, "it goes on with those that it knows"
    await tier.restart()
    await asyncio.sleep(10)
    assert [shard.unheard() for shard in tier.shards.values()] == [[0]] * 3
    for shard in (*tier.shards, "gone"):
        tier.followers.name(shard)
    assert await tier.until_told(30) < 30
    assert [shard.unheard() for shard in tier.shards.values()] == [[]] * 3
    tier.is_supervised = True
    await asyncio.sleep(5)
    assert sorted(tier.followers.lookup._shards) == ["s0", "s1", "s2"]


@of(300, 131_000)
async def test_queries_wait_for_a_step_while_a_lookup_that_restarted_is_told_all(tier):
    waits = await waits_of_queries(tier, 3.0)
    assert np.percentile(waits, 50) < 0.005


@of(500, 10)
async def test_however_many_shards_there_are_their_polls_leave_time_for_queries(tier):
    assert await tier.until_told(60) < 60
    await asyncio.sleep(5)
    before = tier.num_calls
    waits = await waits_of_queries(tier, 10.0)
    assert tier.num_calls - before < 1.1 * CALLS_PER_S * 10
    assert np.percentile(waits, 50) < 0.005


@of(100, 100)
async def test_a_new_block_is_soon_found_elsewhere_in_a_quiet_tier(tier):
    assert await tier.until_told(30) < 30
    index, random, took_s = tier.index, Random(0), []

    async def change(shard: str) -> None:
        known, began = index.keys[shard], tier.loop.time()
        await asyncio.sleep(random.uniform(0, 4 * ANNOUNCE_S))  # until it looks at its tables
        tier.shards[shard]._note(blocks(4), True)
        while index.keys[shard] == known:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
        took_s.append(tier.loop.time() - began)

    changes = []
    for _ in range(300):
        changes.append(asyncio.ensure_future(change(random.choice(list(tier.shards)))))
        await asyncio.sleep(random.expovariate(10))
    await asyncio.gather(*changes)
    assert np.percentile(took_s, 99) < 0.3
