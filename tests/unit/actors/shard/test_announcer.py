import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.actors.lookup.delta import Delta, Poll, partition_of
from kvray.actors.lookup.lookup import Lookup
from kvray.actors.shard import announcer as announcer_module
from kvray.actors.shard.announcer import Announcer, ChangeLog, Entries
from kvray.errors import ShardUnavailable
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.eviction import choose_victims
from kvray.store.nvme import NvmeStore
from tests.examples import examples
from tests.unit.store.nvme.small_store import demote, open_store
from tests.unit.store.small_arena import NOBODY, PLACE, chain, make_arena, store
from tests.waiting import wait_for

MOST = 1000


@contextmanager
def another_arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as directory:
        with closing(make_arena(Path(directory))) as made:
            made.join("test")
            yield made


@pytest.fixture
def arena() -> Iterator[Arena]:
    with another_arena() as made:
        yield made


class Tier:
    """Partitions of a lookup that follow the announcers of shards, one call after the other."""

    def __init__(self, partitions: int = 1) -> None:
        self.lookups = [self._lookup() for _ in range(partitions)]
        self.announcers: dict[str, Announcer] = {}
        self.replies: list[Delta] = []
        self.now = 1000.0

    def _lookup(self) -> Lookup:
        made = Lookup(clock=lambda: self.now)
        made.keep("ab")
        return made

    def shard(self, name: str = "a") -> Announcer:
        made = Announcer(len(self.lookups), clock=lambda: self.now)
        self.announcers[name] = made
        return made

    def restart(self, partition: int = 0) -> None:
        self.lookups[partition] = self._lookup()

    def follow(self, name: str = "a", partition: int = 0) -> None:
        """Ask until there is no more."""
        lookup, more = self.lookups[partition], True
        while more:
            poll = lookup.poll(name, partition, MOST)
            delta = asyncio.run(self.announcers[name].delta(poll, 0.0))
            self.replies.append(delta)
            for _ in lookup.take(name, delta):
                pass
            more = delta.more

    def look(self, arena: Arena, below: NvmeStore | None = None, *, name: str = "a") -> None:
        self.announcers[name].collect(ArenaOwner(arena), below)

    def see(self, arena: Arena, below: NvmeStore | None = None, *, name: str = "a") -> None:
        """Have a shard look at its tables, and every partition follow it."""
        self.look(arena, below, name=name)
        for partition in range(len(self.lookups)):
            self.follow(name, partition)

    def matched(self, keys: list[BlockKey], partition: int = 0) -> int:
        return self.lookups[partition].match(1, *keys).num_blocks

    def sizes(self) -> list[tuple[bool, int]]:
        """Return of each reply whether it begins a list of all, and how many changes it has."""
        return [
            (one.is_full, (len(one.added_keys) + len(one.removed_keys)) // KEY_BYTES)
            for one in self.replies
        ]


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Tier:
    """One shard `a` and one partition, or as many as its parameter says."""
    made = Tier(getattr(request, "param", 1))
    made.shard()
    return made


@pytest.fixture
def announcer(tier: Tier) -> Announcer:
    return tier.announcers["a"]


@pytest.mark.parametrize("is_back", [False, True], ids=["given to others", "and stored again"])
def test_slots_that_get_other_blocks_between_two_looks_are_told_right(tier, arena, is_back):
    old, new = chain(4, seed="old"), chain(2 if is_back else 4, seed="new")
    store(arena, old)
    tier.see(arena)
    ArenaOwner(arena).clear()
    store(arena, new)
    if is_back:
        store(arena, old)
    tier.see(arena)
    assert (tier.matched(old), tier.matched(new)) == (4 * is_back, len(new))


def test_what_leaves_memory_and_then_an_unseen_disk_is_announced_as_gone(tier, arena, tmp_path):
    below = open_store(tmp_path / "nvme")
    owner, keys = ArenaOwner(arena), chain(5)
    store(arena, keys)
    tier.see(arena, below)
    assert tier.matched(keys) == 5
    demote(below, keys)
    owner.clear()
    tier.see(arena, below)
    assert tier.matched(keys) == 5, "the disk has them"
    assert owner.history.counts() == {"cleared": 5}
    tier.restart()
    tier.follow()
    assert tier.matched(keys) == 5, "and they are listed"
    below.evict(np.arange(below.geometry.num_slots))

    def are_gone() -> bool:
        tier.see(arena, below)
        return tier.matched(keys) == 0

    wait_for(are_gone, "the next look at the disk")
    below.close()


def test_all_parts_of_a_block_are_announced_but_for_an_absurd_one(tier, arena):
    store(arena, chain(1, seed="absurd"), part=2**31 - 1)
    keys = chain(3)
    store(arena, keys, part=0)
    store(arena, keys[:2], part=1)
    tier.see(arena)
    assert tier.lookups[0].index.match(b"".join(keys), 2).holders == {"a": 2}


def test_a_log_without_readers_takes_no_memory_and_starts_over(tier, announcer, arena, monkeypatch):
    monkeypatch.setattr(announcer_module, "CHANGES_MAX", 5)
    keys = chain(8)
    tier.look(arena)
    store(arena, keys[:1])
    tier.look(arena)
    assert not announcer._logs[0]._runs, "nobody has asked yet"
    tier.follow()
    store(arena, keys[1:], parent=keys[0], depth=1)
    tier.look(arena)
    assert not announcer._logs[0]._runs, "too much is noted"
    tier.now += 9.0
    assert (announcer.status()["lag_s"], announcer.num_shards) == (9.0, 0)
    tier.follow()
    assert (tier.matched(keys), tier.sizes()) == (8, [(True, 1), (True, 8)])
    assert announcer.status() == {"lag_s": 0.0, "announcements": 2, "seconds": 9.0}


# -- polls that wait ------------------------------------------------------------------------------


def polled(cursor: Any, *, most: int = MOST, **fields: Any) -> Poll:
    return Poll(cursor=cursor, most=most, **fields)


@pytest.mark.anyio
async def test_a_poll_waits_for_news_and_a_heartbeat_comes_without_any(tier, announcer, arena):
    tier.look(arena)
    first = await announcer.delta(polled(None), 60.0)
    beat = await announcer.delta(polled(first.cursor), 0.01)
    assert (beat.cursor, beat.more, beat.added_keys) == (first.cursor, False, b"")
    for act in (
        lambda: store(arena, chain(2)),
        lambda: announcer.name([], [], is_leaving=True),
        lambda: announcer.name([("r", 0)], {7}, is_leaving=True),
        announcer._start_over,
    ):
        waiting = asyncio.ensure_future(announcer.delta(polled(beat.cursor), 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        act()
        tier.look(arena)
        beat = await waiting
    assert (beat.ranks, beat.namespaces, beat.is_leaving) == ((("r", 0),), (7,), True)
    assert beat.is_full
    assert len(beat.added_keys) == 2 * KEY_BYTES


@pytest.mark.anyio
async def test_a_poll_that_is_given_up_ends_with_the_next_and_harms_nothing(tier, announcer, arena):
    store(arena, chain(2))
    tier.look(arena)
    first = await announcer.delta(polled(None), 60.0)
    older = asyncio.ensure_future(announcer.delta(polled(first.cursor), 60.0))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(announcer.delta(polled(first.cursor), 60.0))
    with pytest.raises(ShardUnavailable, match="asked again"):
        await older
    store(arena, chain(1, seed="more"))
    tier.look(arena)
    assert not (await newer).is_full


@pytest.mark.anyio
async def test_who_asks_too_early_or_for_a_partition_too_many_is_told_so(tier, announcer, arena):
    with pytest.raises(ShardUnavailable, match="not looked"):
        await announcer.delta(polled(None), 1.0)
    tier.look(arena)
    with pytest.raises(ShardUnavailable, match="knows 1 partitions"):
        await announcer.delta(polled(None, partition=1), 1.0)


# -- partitions ------------------------------------------------------------------------------------


def chain_of(partition: int, length: int = 3) -> list[BlockKey]:
    """Return the keys of some chain that `partition` of two has."""
    chains = (chain(length, seed=f"{partition} {number}") for number in range(100))
    return next(keys for keys in chains if partition_of(keys[0], 2) == partition)


two = pytest.mark.parametrize("tier", [2], indirect=True)


@two
def test_a_chain_is_announced_to_one_partition_and_removed_there(tier, arena):
    arena.reserve(chain(3, seed="reserved"), **PLACE)  # which is never announced
    tier.see(arena)
    for partition in (0, 1):
        store(arena, chain_of(partition))
    tier.see(arena)
    assert [tier.matched(chain_of(0), partition) for partition in (0, 1)] == [3, 0]
    assert [tier.matched(chain_of(1), partition) for partition in (0, 1)] == [0, 3]
    assert tier.sizes() == [(True, 0), (True, 0), (False, 3), (False, 3)]
    tier.replies.clear()
    tier.restart(1)
    tier.see(arena)
    assert tier.matched(chain_of(1), 1) == 3
    assert tier.sizes() == [(False, 0), (True, 3)], "who restarts is rebuilt alone"
    ArenaOwner(arena).clear()
    tier.see(arena)
    assert [len(one.index) for one in tier.lookups] == [0, 0]


@two
def test_a_block_whose_chain_is_not_known_is_found_and_removed_in_every_partition(tier, arena):
    keys = chain_of(1)
    store(arena, keys[1:], parent=keys[0], depth=1, needs_parent=False)
    tier.see(arena)
    assert [tier.matched(keys[1:], partition) for partition in (0, 1)] == [2, 2]
    ArenaOwner(arena).clear()
    tier.see(arena)
    assert [tier.matched(keys[1:], partition) for partition in (0, 1)] == [0, 0]


@pytest.mark.anyio
@two
async def test_a_greeting_is_answered_at_once_and_brings_no_block(tier, announcer, arena):
    store(arena, chain(2))
    tier.look(arena)
    for partition, namespaces in ((0, (5,)), (1, (5, 7)), (0, ())):
        asked = polled(None, most=0, partition=partition, num_shards=7, namespaces=namespaces)
        said = await announcer.delta(asked, 60.0)
        assert (said.cursor, said.added_keys, said.more) == (None, b"", True)
    assert (announcer.num_shards, announcer.is_cut_off) == (7, False)
    assert announcer.namespaces == {5, 7}, "also while a partition starts"
    tier.now += 9.0
    assert (announcer.num_shards, announcer.is_cut_off) == (0, True)


def test_what_lost_its_other_part_is_evicted_first(tier, arena):
    old, partial, used = (chain(1, seed=seed) for seed in ("old", "partial", "used"))
    slots = [store(arena, keys, part=1).slots[0] for keys in (old, partial, used)]
    tier.see(arena)
    with another_arena() as other:
        tier.shard("b")
        store(other, partial, part=0)
        tier.see(other, name="b")
        ArenaOwner(other).clear()
        tier.see(other, name="b")
    tier.follow()
    tier.look(arena)
    within = np.arange(arena.tables.geometry.num_slots)
    victims = choose_victims(arena.tables, 3, within=within, protect=NOBODY)
    assert victims.tolist() == [slots[1], slots[0], slots[2]]


# -- lines that lose, repeat and delay, and tiers that cross ---------------------------------------

KEYS = chain(6)


def entries(numbers: list[int]) -> Entries:
    keys = np.frombuffer(b"".join(KEYS[n] for n in numbers), dtype="<u8").reshape(-1, 4)
    nothing = np.zeros(len(numbers), dtype=np.uint32)
    return Entries(keys=keys, parts=nothing, heads=nothing)


class Following(RuleBasedStateMachine):
    """A log of a shard with two tiers, and a lookup that reads it over a bad line.

    A block that leaves one tier is noted as gone only if the other lacks it, as the `Announcer`
    does; found in one tier it is noted even if the other has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tiers: tuple[set[int], set[int]] = set(), set()
        self.log = ChangeLog(lambda: [entries(sorted(self.held))])
        self.late: list[Delta] = []
        self.restart_lookup()

    @property
    def held(self) -> set[int]:
        return self.tiers[0] | self.tiers[1]

    def restart_lookup(self) -> None:
        self.lookup = Lookup()
        self.lookup.keep("a")

    @rule(what=st.sampled_from(["lookup", "shard", "log", "", "", ""]))
    def restart(self, what: str) -> None:
        if what == "lookup":
            self.restart_lookup()
        elif what == "shard":
            self.log = ChangeLog(lambda: [entries(sorted(self.held))])
        elif what == "log":
            self.log.start_over()

    @rule(come=st.sets(st.integers(0, 5)), gone=st.sets(st.integers(0, 5)), at=st.integers(0, 1))
    def look(self, come: set[int], gone: set[int], at: int) -> None:
        tier, other = self.tiers[at], self.tiers[1 - at]
        gone = gone & tier
        come = come - tier
        tier -= gone
        self.log.note(entries(sorted(gone - other)), False, 0.0)
        tier |= come
        self.log.note(entries(sorted(come)), True, 0.0)

    def ask(self, most: int) -> Delta:
        delta = self.log.delta(self.lookup.poll("a", 0, most).cursor, most, 0.0)
        assert len(delta.added_keys) + len(delta.removed_keys) <= most * KEY_BYTES
        return delta

    def take(self, delta: Delta) -> None:
        for _ in self.lookup.take("a", delta):
            pass

    @rule(most=st.integers(1, 4), times=st.integers(1, 2))
    def answer(self, most: int, times: int) -> None:
        delta = self.ask(most)
        for _ in range(times):
            self.take(delta)

    @rule(most=st.integers(1, 4))
    def lose_or_delay(self, most: int) -> None:
        self.late.append(self.ask(most))

    @rule(at=st.integers(0, 20))
    def arrive(self, at: int) -> None:
        if self.late:
            self.take(self.late.pop(at % len(self.late)))

    @rule(most=st.integers(1, 4))
    def catch_up(self, most: int) -> None:
        """Whatever the line did, the index is right once there is no more."""
        for _ in range(40):
            delta = self.ask(most)
            self.take(delta)
            if not delta.more:
                break
        found = {n for n, key in enumerate(KEYS) if self.lookup.locate(key)}
        assert found == self.held

    @invariant()
    def log_is_bounded(self) -> None:
        assert self.log._last - self.log._first <= max(0, self.log._most)


Following.TestCase.settings = settings(
    max_examples=examples(600), stateful_step_count=30, deadline=None
)
TestFollowing = Following.TestCase
