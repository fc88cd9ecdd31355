import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvray.actors import announcer as announcer_module
from kvray.actors.announcer import Announcer
from kvray.actors.lookup import Lookup
from kvray.actors.openings import Origin
from kvray.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.eviction import choose_victims
from tests.unit.actors.small_shard import NAMESPACE, OTHER_LAYOUT, Line
from tests.unit.store.small_arena import NOBODY, chain, make_arena, store


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


def test_what_is_committed_and_evicted_is_announced(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys = chain(5)
    tell(announcer, arena)
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 5
    ArenaOwner(arena).clear()
    tell(announcer, arena)
    assert line.matched(keys) == 0
    assert len(line.lookup.index) == 0


def test_what_is_only_reserved_is_not_announced(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys = chain(3)
    arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=4096)
    tell(announcer, arena)
    assert line.matched(keys) == 0


def test_a_slot_given_to_another_block_between_two_rounds_is_told_right(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    old, new = chain(4, seed="old"), chain(4, seed="new")
    store(arena, old)
    tell(announcer, arena)
    ArenaOwner(arena).clear()
    store(arena, new)
    tell(announcer, arena)
    assert (line.matched(old), line.matched(new)) == (0, 4)


def test_a_block_evicted_and_stored_again_between_two_rounds_stays(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys = chain(4)
    store(arena, keys)
    tell(announcer, arena)
    ArenaOwner(arena).clear()
    store(arena, chain(2, seed="other"))
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 4


def test_an_adopted_arena_is_announced_in_full(arena: Arena, line: Line) -> None:
    keys = chain(4)
    store(arena, keys)
    tell(Announcer("a", line.announce), arena, epoch=1)
    line.lookup = Lookup()
    tell(Announcer("a", line.announce), arena, epoch=2)
    assert line.matched(keys) == 4


def test_without_changes_a_heartbeat_is_sent(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    tell(announcer, arena)
    announcer.send(1)
    assert [(each.full, each.added_keys) for each in line.heard] == [(True, b""), (False, b"")]


def test_a_lookup_that_was_away_gets_everything(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
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


def test_a_restarted_lookup_is_rebuilt_within_two_rounds(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys = chain(6)
    store(arena, keys)
    tell(announcer, arena)
    line.lookup = Lookup()
    announcer.send(1)
    announcer.send(1)
    assert line.matched(keys) == 6


def test_no_number_is_given_twice(announcer: Announcer, arena: Arena, line: Line) -> None:
    for cut in (False, True, False, False):
        line.cut = cut
        announcer.collect(ArenaOwner(arena))
        announcer.send(1)
    assert [each.sequence for each in line.heard] == [1, 3, 4]
    assert [each.full for each in line.heard] == [True, True, False]


def test_announcements_are_bounded_and_their_order_kept(
    announcer: Announcer, arena: Arena, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "ANNOUNCED_MAX", 4)
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
    sizes = [len(each.added_parts) + len(each.removed_parts) for each in line.heard]
    assert max(sizes) <= 4


def test_a_full_announcement_in_pieces_replaces_what_was_there(
    announcer: Announcer, arena: Arena, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "ANNOUNCED_MAX", 4)
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


def test_an_absurd_part_keeps_nothing_else_from_being_announced(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys = chain(2)
    absurd = chain(1, seed="absurd")
    made = arena.reserve(absurd, parent=None, depth=0, part=2**31 - 1, block_bytes=4096)
    assert made is not None
    assert arena.commit(made, np.zeros(1, dtype="<u8"))
    store(arena, keys)
    tell(announcer, arena)
    assert line.matched(keys) == 2


def test_two_parts_of_a_block_are_announced_both(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    keys: list[BlockKey] = chain(3)
    store(arena, keys, part=0)
    store(arena, keys[:2], part=1)
    tell(announcer, arena)
    assert line.lookup.index.match(b"".join(keys), 2).holders == {"a": 2}


def test_only_the_last_piece_says_that_there_is_no_more(
    announcer: Announcer, arena: Arena, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "ANNOUNCED_MAX", 4)
    store(arena, chain(10))
    tell(announcer, arena)
    assert [(each.full, each.more) for each in line.heard] == [
        (True, True),
        (False, True),
        (False, False),
    ]


# -- ranks and shards ------------------------------------------------------------------------------


def test_ranks_are_announced_when_they_change_and_in_full_ones(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    announcer.name_ranks([("r", 1), ("r", 0)])
    tell(announcer, arena)
    announcer.send(1)
    announcer.name_ranks([("r", 1)])
    assert announcer.collect(ArenaOwner(arena)), "what changed is announced at once"
    announcer.send(1)
    line.lookup = Lookup()
    tell(announcer, arena)
    tell(announcer, arena)
    said = [each.ranks for each in line.heard]
    assert said == [[("r", 0), ("r", 1)], None, [("r", 1)], None, [("r", 1)], None]
    assert line.lookup.replica("r", time.monotonic()) == {1: "a"}


def test_ranks_that_a_lookup_never_got_are_announced_again(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    tell(announcer, arena)
    announcer.name_ranks([("r", 0)])
    line.cut = True
    tell(announcer, arena)
    line.cut = False
    tell(announcer, arena)
    assert line.lookup.replica("r", time.monotonic()) == {0: "a"}


def test_a_shard_knows_how_many_there_are(announcer: Announcer, arena: Arena, line: Line) -> None:
    assert announcer.num_shards == 0
    tell(Announcer("b", line.announce), arena)
    tell(announcer, arena)
    assert announcer.num_shards == 2
    line.cut = True
    tell(announcer, arena)
    assert announcer.num_shards == 0


# -- orphans --------------------------------------------------------------------------------------


def test_what_lost_its_other_part_is_evicted_first(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    old, orphan, used = (chain(1, seed=seed) for seed in ("old", "orphan", "used"))
    slots = [store(arena, keys, part=1).slots[0] for keys in (old, orphan, used)]
    tell(announcer, arena)
    with another_arena() as other:
        other_shard = Announcer("b", line.announce)
        store(other, orphan, part=0)
        tell(other_shard, other)
        ArenaOwner(other).clear()
        tell(other_shard, other)
    tell(announcer, arena)
    announcer.collect(ArenaOwner(arena))
    within = np.arange(arena.tables.geometry.num_slots)
    victims = choose_victims(arena.tables, 3, within=within, protect=NOBODY)
    assert victims.tolist() == [slots[1], slots[0], slots[2]]


# -- openings of prompts --------------------------------------------------------------------------

OPENING = bytes(8)
MINE = Origin(replica="mine", rank=0, namespace=NAMESPACE)
THEIRS = Origin(replica="theirs", rank=0, namespace=OTHER_LAYOUT)


def test_what_engines_noted_is_announced_and_the_answer_kept_for_them(
    announcer: Announcer, arena: Arena
) -> None:
    announcer.desk.note(THEIRS, [(OPENING, 0)])
    announcer.desk.note(MINE, [(OPENING, 64), (OPENING, 0)])
    tell(announcer, arena)
    (answer,) = announcer.desk.answers("mine", 0)
    assert (answer["num_tokens"], answer["replica"]) == (64, "theirs")


def test_what_engines_noted_waits_for_the_next_heartbeat(
    announcer: Announcer, arena: Arena
) -> None:
    tell(announcer, arena)
    announcer.desk.note(MINE, [(OPENING, 0)])
    assert not announcer.collect(ArenaOwner(arena))


def test_notes_that_a_lookup_refused_or_never_got_are_announced_again(
    announcer: Announcer, arena: Arena, line: Line
) -> None:
    tell(announcer, arena)
    announcer.desk.note(THEIRS, [(OPENING, 0)])
    line.cut = True
    tell(announcer, arena)
    line.cut, line.lookup = False, Lookup()
    tell(announcer, arena)
    announcer.desk.note(MINE, [(OPENING, 64)])
    line.lookup = Lookup()
    tell(announcer, arena)
    tell(announcer, arena)
    assert [answer["num_tokens"] for answer in announcer.desk.answers("mine", 0)] == [64]
