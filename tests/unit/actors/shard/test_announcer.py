import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvray.actors.lookup.lookup import TURNS, Announcement, Answer, Lookup
from kvray.actors.lookup.partitions import partition_of
from kvray.actors.shard import announcer as stream_module
from kvray.actors.shard.announcer import Announcer
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.eviction import choose_victims
from tests.unit.actors.small_shard import Line
from tests.unit.store.nvme.small_store import demote, open_store
from tests.unit.store.small_arena import NOBODY, chain, make_arena, store
from tests.waiting import wait_for


@contextmanager
def another_arena() -> Iterator[Arena]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    made = make_arena(directory)
    made.join("test")
    yield made
    made.close()
    shutil.rmtree(directory)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with another_arena() as made:
        yield made


@pytest.fixture
def announcer(line: Line) -> Announcer:
    return Announcer("a", line.announce)


def tell(announcer: Announcer, arena: Arena, *, epoch: int = 1) -> None:
    """Do what a shard does in one round, until nothing waits any more."""
    announcer.collect(ArenaOwner(arena))
    announcer.send(epoch)
    while announcer.collect(ArenaOwner(arena)):
        announcer.send(epoch)


def test_what_is_committed_and_evicted_is_announced(announcer, arena, line):
    keys = chain(5)
    tell(announcer, arena)
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 5
    ArenaOwner(arena).clear()
    tell(announcer, arena)
    assert line.matched(keys) == 0
    assert len(line.lookup.index) == 0


def test_what_is_only_reserved_is_not_announced(announcer, arena, line):
    arena.reserve(chain(3), parent=None, depth=0, part=0, block_bytes=4096)
    tell(announcer, arena)
    assert line.matched(chain(3)) == 0


@pytest.mark.parametrize("is_back", [False, True], ids=["given to others", "and stored again"])
def test_slots_that_are_given_to_other_blocks_between_two_rounds_are_told_right(
    announcer, arena, line, is_back
):
    old, new = chain(4, seed="old"), chain(2 if is_back else 4, seed="new")
    store(arena, old)
    tell(announcer, arena)
    ArenaOwner(arena).clear()
    store(arena, new)
    if is_back:
        store(arena, old)
    tell(announcer, arena)
    assert (line.matched(old), line.matched(new)) == (4 * is_back, len(new))


def test_what_leaves_memory_and_then_a_disk_that_was_not_looked_at_is_announced_as_gone(
    announcer, arena, line, tmp_path
):
    below = open_store(tmp_path / "nvme")
    owner, keys = ArenaOwner(arena), chain(5)
    store(arena, keys)
    announcer.collect(owner, below)
    announcer.send(1)
    assert line.matched(keys) == 5
    demote(below, keys)
    owner.clear()
    announcer.collect(owner, below)
    announcer.send(1)
    assert line.matched(keys) == 5, "the disk has them"
    below.evict(np.arange(below.geometry.num_slots))
    wait_for(lambda: announcer.collect(owner, below), "the next look at the disk")
    announcer.send(1)
    assert line.matched(keys) == 0
    below.close()


def test_what_leaves_memory_and_stays_on_a_disk_that_was_not_looked_at_has_not_left_it(
    announcer, arena, line, tmp_path
):
    below = open_store(tmp_path / "nvme")
    owner, keys = ArenaOwner(arena), chain(5)
    store(arena, keys)
    announcer.collect(owner, below)
    demote(below, keys)
    owner.clear()
    announcer.collect(owner, below)
    announcer.send(1)
    assert line.matched(keys) == 5
    assert owner.history.counts() == {"cleared": 5}
    below.close()


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_lookup_that_restarts_is_rebuilt_within_two_rounds_and_by_a_shard_that_does_at_once(
    announcer, arena, line, is_restart
):
    keys = chain(6)
    store(arena, keys)
    tell(announcer, arena)
    line.lookup = Lookup()
    if is_restart:
        tell(Announcer("a", line.announce), arena, epoch=2)
    else:
        announcer.send(1)
        announcer.send(1)
    assert line.matched(keys) == 6


def test_without_changes_a_heartbeat_is_sent(announcer, arena, line):
    tell(announcer, arena)
    announcer.send(1)
    assert [(each.full, each.added_keys) for each in line.heard] == [(True, b""), (False, b"")]


def test_a_lookup_that_was_away_gets_everything(announcer, arena, line):
    keys = chain(6)
    store(arena, keys[:2])
    tell(announcer, arena)
    line.cut = True
    store(arena, keys[2:4], parent=keys[1], depth=2)
    tell(announcer, arena)
    line.cut = False
    store(arena, keys[4:], parent=keys[3], depth=4)
    tell(announcer, arena)
    assert line.matched(keys) == 6


def test_no_number_is_given_twice(announcer, arena, line):
    for cut in (False, True, False, False):
        line.cut = cut
        announcer.collect(ArenaOwner(arena))
        announcer.send(1)
    assert [each.sequence for each in line.heard] == [1, 3, 4]
    assert [each.full for each in line.heard] == [True, True, False]


def test_announcements_are_bounded_and_their_order_kept(announcer, arena, line, monkeypatch):
    monkeypatch.setattr(stream_module, "ANNOUNCED_MAX", 4)
    first, second = chain(20, seed="first"), chain(20, seed="second")
    store(arena, first)
    tell(announcer, arena)
    assert line.matched(first) == 20
    ArenaOwner(arena).clear()
    announcer.collect(ArenaOwner(arena))
    store(arena, second)
    store(arena, first)
    tell(announcer, arena)
    assert (line.matched(first), line.matched(second)) == (20, 20)
    sizes = [each.num_entries for each in line.heard]
    assert max(sizes) <= 4


def test_a_full_announcement_in_pieces_replaces_what_was_there(announcer, arena, line, monkeypatch):
    monkeypatch.setattr(stream_module, "ANNOUNCED_MAX", 4)
    gone, kept = chain(3, seed="gone"), chain(10, seed="kept")
    store(arena, gone)
    tell(announcer, arena)
    line.cut = True
    ArenaOwner(arena).clear()
    store(arena, kept)
    tell(announcer, arena)
    line.cut = False
    tell(announcer, arena)
    assert (line.matched(gone), line.matched(kept)) == (0, 10)


def test_an_absurd_part_keeps_nothing_else_from_being_announced(announcer, arena, line):
    absurd = chain(1, seed="absurd")
    made = arena.reserve(absurd, parent=None, depth=0, part=2**31 - 1, block_bytes=4096)
    assert arena.commit(made, np.zeros(1, dtype="<u8"))
    keys = chain(2)
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 2


def test_two_parts_of_a_block_are_announced_both(announcer, arena, line):
    keys: list[BlockKey] = chain(3)
    store(arena, keys, part=0)
    store(arena, keys[:2], part=1)
    tell(announcer, arena)
    assert line.lookup.index.match(b"".join(keys), 2).holders == {"a": 2}


def test_only_the_last_piece_says_that_there_is_no_more(announcer, arena, line, monkeypatch):
    monkeypatch.setattr(stream_module, "ANNOUNCED_MAX", 4)
    store(arena, chain(10))
    tell(announcer, arena)
    assert [(each.full, each.more) for each in line.heard] == [
        (True, True),
        (False, True),
        (False, False),
    ]


# -- a lookup that is slow, or has much to do -----------------------------------------------------


def test_an_answer_that_is_late_counts(announcer, arena, line, monkeypatch):
    monkeypatch.setattr(stream_module, "_UNHEARD_S", -1.0)
    keys = chain(6)
    store(arena, keys[:2])
    line.late = 3
    announcer.collect(ArenaOwner(arena))
    announcer.send(1)
    assert announcer.num_shards == 0, "for now nobody can be asked for blocks"
    store(arena, keys[2:], parent=keys[1], depth=2)
    for _ in range(2):
        announcer.collect(ArenaOwner(arena))
        announcer.send(1)
    assert [(each.sequence, each.full) for each in line.heard] == [(1, True), (2, False)]
    assert (line.matched(keys), announcer.num_shards) == (6, 1)


def test_a_late_answer_to_what_is_outdated_does_not_keep_all_from_being_said_again(
    announcer, arena, line
):
    keys = chain(2)
    store(arena, keys)
    line.late = 1
    announcer.collect(ArenaOwner(arena))
    announcer.send(1)
    announcer._start_over()
    tell(announcer, arena)
    assert [each.full for each in line.heard] == [True, True]
    assert line.matched(keys) == 2


def test_an_answer_that_never_comes_is_given_up_and_all_is_said_again(announcer, arena, line):
    keys = chain(2)
    store(arena, keys)
    tell(announcer, arena)
    announcer._streams[0]._patience_s = -1.0
    line.late = 1
    tell(announcer, arena)
    announcer._streams[0]._patience_s = 30.0
    tell(announcer, arena)
    assert [(each.sequence, each.full) for each in line.heard] == [(1, True), (3, True)]
    assert line.matched(keys) == 2


def test_the_longer_answers_take_the_longer_they_are_waited_for(
    announcer, arena, line, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: now)
    announcer.collect(ArenaOwner(arena))
    given_up = []
    for _ in range(4000):
        line.late = 1
        was_under_way = announcer._streams[0]._under_way is not None
        announcer.send(1)
        if was_under_way and announcer._streams[0]._under_way is None:
            given_up.append(now)
        now += 1.0
    waits = np.diff(given_up)
    assert waits[0] == pytest.approx(60, abs=6)
    assert waits[-1] == pytest.approx(480, abs=6)


def test_what_is_announced_says_when_its_answer_is_given_up_by_the_lookups_clock(
    announcer, arena, line
):
    class Behind(Lookup):
        def announce(self, announcement: Announcement, now: float) -> Answer:
            return super().announce(announcement, now - 5000)

    line.lookup = Behind()
    tell(announcer, arena)
    announcer.send(1)
    first, second = line.heard
    assert first.until is None, "the clock is not known yet"
    epoch, until = second.until
    assert epoch == line.lookup.epoch
    assert until == pytest.approx(time.monotonic() - 5000 + stream_module._PATIENCE_S, abs=5)


def test_after_failures_in_a_row_it_is_tried_less_and_less_often(
    announcer, arena, line, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: now)
    announcer.collect(ArenaOwner(arena))
    line.cut, tries = True, []
    for _ in range(4000):
        before = announcer._streams[0]._sequence
        announcer.send(1)
        if announcer._streams[0]._sequence > before:
            tries.append(now)
        now += 0.01
    pauses = np.diff(tries)
    assert pauses[0] < 0.02, "one that fails once may have been replaced"
    assert 0.25 <= pauses[1] <= 0.52
    assert 2.0 <= min(pauses[5:]) < max(pauses[5:]) <= 4.02, "and not all shards at once"


def test_a_shard_says_nothing_for_as_long_as_the_lookup_asks_once_it_has_said_all(
    announcer, arena, line, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(stream_module, "ANNOUNCED_MAX", 4)
    monkeypatch.setattr(Lookup, "pause_s", 2.0)
    store(arena, chain(10))
    tell(announcer, arena)
    assert [len(each.added_keys) // KEY_BYTES for each in line.heard] == [4, 4, 2], (
        "a list is not torn apart"
    )
    store(arena, chain(2, seed="more"))
    now += 1.4
    tell(announcer, arena)
    assert len(line.heard) == 3
    now += 1.2
    tell(announcer, arena)
    assert [len(each.added_keys) // KEY_BYTES for each in line.heard[3:]] == [2]


class Crowd(Lookup):
    """A lookup whose turns are all taken, until `has_turn`."""

    has_turn = False

    def announce(self, announcement: Announcement, now: float) -> Answer:
        for other in () if self.has_turn else range(TURNS):
            self._turns.take(f"other {other}", now)
        for other in range(TURNS) if self.has_turn else ():
            self._turns.go_on(f"other {other}", now, more=False)
        return super().announce(announcement, now)


def test_a_shard_that_has_to_wait_for_its_turn_asks_with_nothing_and_then_says_all(
    announcer, arena, line, monkeypatch
):
    monkeypatch.setattr(stream_module, "_FIRST_MAX", 4)
    line.lookup = Crowd()
    keys = chain(10)
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 0
    asked = len(line.heard)
    tell(announcer, arena)
    assert len(line.heard) == asked, "it is not time yet"
    announcer._streams[0]._send_at = 0.0
    tell(announcer, arena)
    line.lookup.has_turn = True
    announcer._streams[0]._send_at = 0.0
    tell(announcer, arena)
    assert line.matched(keys) == 10
    said = [(each.full, len(each.added_keys) // KEY_BYTES, each.more) for each in line.heard]
    asked = [(True, 4, True), (True, 0, True), (True, 0, True)]
    assert said == [*asked, (False, 4, True), (False, 6, False)]


def test_a_shard_without_blocks_gives_its_turn_back_at_once(announcer, arena, line):
    line.lookup = Crowd()
    announcer._streams[0]._has_to_ask = True
    line.lookup.has_turn = True
    tell(announcer, arena)
    assert [each.more for each in line.heard] == [True, False]


def test_pieces_get_smaller_where_the_lookup_takes_long_and_larger_again(
    announcer, arena, line, monkeypatch
):
    monkeypatch.setattr(stream_module, "_FIRST_MAX", 8)
    monkeypatch.setattr(stream_module, "_LEAST_MAX", 2)
    key_s = 0.05
    original = line.announce

    def slow(announcement: Announcement) -> Answer | None:
        answer = original(announcement)
        return replace(answer, took_s=key_s * announcement.num_entries)

    announcer._streams[0]._announce = slow
    store(arena, chain(20))
    tell(announcer, arena)
    assert [len(each.added_keys) // KEY_BYTES for each in line.heard] == [8, 2, 2, 2, 2, 2, 2]
    key_s = 1e-6
    store(arena, chain(20, seed="more"))
    tell(announcer, arena)
    assert [len(each.added_keys) // KEY_BYTES for each in line.heard[7:]] == [2, 8, 10]


# -- partitions ------------------------------------------------------------------------------------


class Partitions:
    """Two partitions, each with a line of its own, and the announcer of a shard."""

    def __init__(self) -> None:
        self.lines = [Line(), Line()]
        self.announcer = Announcer("a", *(line.announce for line in self.lines))

    def matched(self, keys: list[BlockKey]) -> list[int]:
        """Return what each partition says of `keys`."""
        return [line.matched(keys) for line in self.lines]

    def forget_heard(self) -> None:
        for line in self.lines:
            line.heard.clear()


def chain_of(partition: int, length: int = 3) -> list[BlockKey]:
    """Return the keys of some chain that `partition` of two has."""
    chains = (chain(length, seed=f"{partition} {number}") for number in range(100))
    return next(keys for keys in chains if partition_of(keys[0], 2) == partition)


@pytest.fixture
def two() -> Partitions:
    return Partitions()


def test_a_chain_is_announced_to_one_partition_and_removed_there(two, arena):
    tell(two.announcer, arena)
    store(arena, chain_of(0))
    store(arena, chain_of(1))
    tell(two.announcer, arena)
    assert (two.matched(chain_of(0)), two.matched(chain_of(1))) == ([3, 0], [0, 3])
    ArenaOwner(arena).clear()
    tell(two.announcer, arena)
    assert [len(line.lookup.index) for line in two.lines] == [0, 0]


def test_a_block_whose_chain_is_not_known_is_found_and_removed_in_every_partition(two, arena):
    keys = chain_of(1)
    made = arena.reserve(
        keys[1:], parent=keys[0], depth=1, part=0, block_bytes=4096, needs_parent=False
    )
    assert arena.commit(made, np.zeros(2, dtype="<u8"))
    tell(two.announcer, arena)
    assert two.matched(keys[1:]) == [2, 2]
    ArenaOwner(arena).clear()
    tell(two.announcer, arena)
    assert [len(line.lookup.index) for line in two.lines] == [0, 0]


def test_a_partition_that_restarts_is_rebuilt_alone(two, arena):
    store(arena, chain_of(0))
    store(arena, chain_of(1))
    tell(two.announcer, arena)
    two.forget_heard()
    two.lines[1].lookup = Lookup()
    two.announcer.send(1)
    tell(two.announcer, arena)
    assert (two.matched(chain_of(0)), two.matched(chain_of(1))) == ([3, 0], [0, 3])
    assert not any(each.full or each.added_keys for each in two.lines[0].heard)
    assert [each.num_entries for each in two.lines[1].heard if each.full] == [3]


def test_a_partition_that_does_not_answer_holds_up_no_other(two, arena):
    tell(two.announcer, arena)
    two.lines[0].late = 10**6
    store(arena, chain_of(0))
    store(arena, chain_of(1))
    tell(two.announcer, arena)
    assert two.matched(chain_of(1)) == [0, 3]
    assert two.announcer.num_shards == 1, "the other one says so"
    two.lines[0].late = 0
    tell(two.announcer, arena)
    assert two.matched(chain_of(0)) == [3, 0]


def test_only_the_first_partition_is_told_of_ranks_and_namespaces(two, arena):
    two.announcer.name_ranks([("r", 0)], {9, 7})
    tell(two.announcer, arena)
    said = [[(each.ranks, each.namespaces) for each in one.heard] for one in two.lines]
    assert said == [[([("r", 0)], (7, 9))], [(None, ())]]
    assert two.announcer.namespaces == {7, 9}


def test_without_changes_each_partition_hears_a_heartbeat_only_if_one_is_due(two, arena):
    tell(two.announcer, arena)
    two.forget_heard()
    store(arena, chain_of(1))
    two.announcer.collect(ArenaOwner(arena))
    two.announcer.send(1, is_due=False)
    assert [len(line.heard) for line in two.lines] == [0, 1]
    two.announcer.send(1)
    assert [len(line.heard) for line in two.lines] == [1, 2]


# -- ranks and shards ------------------------------------------------------------------------------


def test_ranks_are_announced_when_they_change_and_in_full_ones(announcer, arena, line):
    announcer.name_ranks([("r", 1), ("r", 0)], ())
    tell(announcer, arena)
    announcer.send(1)
    announcer.name_ranks([("r", 1)], ())
    assert announcer.collect(ArenaOwner(arena)), "what changed is announced at once"
    announcer.send(1)
    line.lookup = Lookup()
    tell(announcer, arena)
    tell(announcer, arena)
    said = [each.ranks for each in line.heard]
    assert said == [[("r", 0), ("r", 1)], None, [("r", 1)], None, [("r", 1)], None]
    assert line.lookup.replica("r", time.monotonic()) == {1: "a"}


def test_ranks_that_a_lookup_never_got_are_announced_again(announcer, arena, line):
    tell(announcer, arena)
    announcer.name_ranks([("r", 0)], ())
    line.cut = True
    tell(announcer, arena)
    line.cut = False
    tell(announcer, arena)
    assert line.lookup.replica("r", time.monotonic()) == {0: "a"}


def test_a_shard_knows_how_many_there_are(announcer, arena, line):
    assert announcer.num_shards == 0
    tell(Announcer("b", line.announce), arena)
    tell(announcer, arena)
    assert announcer.num_shards == 2
    line.cut = True
    tell(announcer, arena)
    assert announcer.num_shards == 0


# -- partial blocks ------------------------------------------------------------------------------


def test_what_lost_its_other_part_is_evicted_first(announcer, arena, line):
    old, partial, used = (chain(1, seed=seed) for seed in ("old", "partial", "used"))
    slots = [store(arena, keys, part=1).slots[0] for keys in (old, partial, used)]
    tell(announcer, arena)
    with another_arena() as other:
        other_shard = Announcer("b", line.announce)
        store(other, partial, part=0)
        tell(other_shard, other)
        ArenaOwner(other).clear()
        tell(other_shard, other)
    tell(announcer, arena)
    announcer.collect(ArenaOwner(arena))
    within = np.arange(arena.tables.geometry.num_slots)
    victims = choose_victims(arena.tables, 3, within=within, protect=NOBODY)
    assert victims.tolist() == [slots[1], slots[0], slots[2]]
