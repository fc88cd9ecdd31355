import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.lookup import lookup as lookup_module
from kvray.actors.lookup.lookup import (
    CALLS_PER_S,
    SILENT_S,
    TURN_S,
    TURNS,
    Announcement,
    Answer,
    Lookup,
    PartialBlocks,
    RankDirectory,
    Turns,
    packed_parts,
)
from kvray.actors.lookup.partitions import partition_of, shares
from kvray.errors import ConfigError
from kvray.identity.block import BlockKey, head_number, split_keys
from kvray.index import Index, Loss, Run
from tests.examples import examples
from tests.unit.store.small_arena import chain

KEYS = [BlockKey(hashlib.sha256(bytes([n])).digest()) for n in range(5)]


def said(sequence: int, *, full: bool = False, **fields: Any) -> Announcement:
    """Return an announcement of shard `a`; `added` and `removed` are numbers of keys."""
    added, removed = fields.pop("added", []), fields.pop("removed", [])
    part = fields.pop("part", 0)
    values = {"shard": "a", "arena_id": "arena-1", "shard_epoch": 1} | fields
    return Announcement(
        **values,
        sequence=sequence,
        full=full,
        added_keys=b"".join(KEYS[n] for n in added),
        added_parts=packed_parts([part] * len(added)),
        removed_keys=b"".join(KEYS[n] for n in removed),
        removed_parts=packed_parts([part] * len(removed)),
    )


class Hearing(Lookup):
    """A lookup that hears what is `said` at a time, at 0 if nothing else is told."""

    def hear(self, sequence: int, *, now: float = 0.0, **fields: Any) -> Answer:
        return self.announce(said(sequence, **fields), now)

    @property
    def has(self) -> set[int]:
        return {n for n, key in enumerate(KEYS) if self.index.match(key, 1).num_blocks}


@pytest.fixture
def lookup() -> Hearing:
    """A lookup that has keys 0 and 1 of shard `a`, announced with number 1."""
    made = Hearing()
    assert not made.hear(1, full=True, added=[0, 1]).resync
    return made


def test_announcements_in_order_are_taken(lookup):
    assert not lookup.hear(2, added=[2], removed=[0]).resync
    assert lookup.has == {1, 2}


def test_the_first_announcement_must_be_a_full_one():
    lookup = Hearing()
    assert lookup.hear(1, added=[0]).resync
    assert lookup.has == set()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"sequence": 3}, id="lost"),
        pytest.param({"sequence": 1}, id="repeated"),
        pytest.param({"sequence": 1, "full": True}, id="repeated full"),
        pytest.param({"sequence": 2, "shard_epoch": 2}, id="newer"),
        pytest.param({"sequence": 2, "shard_epoch": 0}, id="older"),
        pytest.param({"sequence": 9, "shard_epoch": 0, "full": True}, id="older full"),
        pytest.param({"sequence": 2, "arena_id": "arena-2"}, id="other arena"),
    ],
)
def test_what_does_not_follow_is_refused_and_changes_nothing(lookup, fields):
    assert lookup.hear(**fields, added=[2]).resync
    assert lookup.has == {0, 1}
    assert not lookup.hear(2, added=[3]).resync


def test_each_shard_hears_of_the_namespaces_of_all(lookup):
    lookup.hear(1, full=True, shard="b", ranks=[], namespaces=(7, 9))
    assert lookup.hear(9, ranks=[], namespaces=(5,)).namespaces == ()
    answer = lookup.hear(2, ranks=[], namespaces=(7, 8))
    assert set(answer.namespaces) == {7, 8, 9}
    lookup.drop("b")
    assert set(lookup.hear(3).namespaces) == {7, 8}
    lookup.hear(4, ranks=[], namespaces=(8,))
    assert lookup.hear(5).namespaces == (8,)


def test_a_full_one_replaces_all_that_the_shard_had_and_leaves_others_alone(lookup):
    lookup.hear(1, full=True, added=[3], shard="b")
    assert not lookup.hear(5, full=True, added=[4]).resync
    assert lookup.has == {3, 4}


def test_what_its_shard_does_not_wait_for_any_more_is_not_taken(lookup):
    late = said(2, added=[2], until=(lookup.epoch, 0.9))
    assert lookup.announce(late, now=1.0).resync
    assert lookup.has == {0, 1}
    assert lookup.status(now=1.0)["expired"] == 1
    assert not lookup.announce(late, now=0.8).resync
    assert lookup.has == {0, 1, 2}


def test_when_a_shard_gives_up_by_the_clock_of_another_lookup_says_nothing(lookup):
    assert not lookup.hear(2, added=[2], until=("another", -9.0)).resync


def test_only_so_many_shards_announce_at_once_what_does_not_fit_in_one(lookup):
    for n in range(TURNS):
        assert not lookup.hear(1, full=True, shard=f"s{n}", added=[0], more=True).resync
    answer = lookup.hear(9, full=True, added=[2], more=True)
    assert answer.resync
    assert answer.wait_s > 0
    assert answer.num_shards == TURNS + 1, "which can be asked for blocks meanwhile"
    assert lookup.has == {0, 1}
    assert lookup.hear(3).wait_s > 0, "who is out of step need not try"
    assert not lookup.hear(10, full=True, added=[2]).resync, "it is all there"
    assert not lookup.hear(2, shard="s0", added=[3]).resync
    assert not lookup.hear(1, full=True, shard="b", added=[2], more=True).resync, "one turn is over"


def test_a_restarted_shard_is_heard_from_its_first_number_on(lookup):
    assert not lookup.hear(1, full=True, added=[2], shard_epoch=9).resync
    assert lookup.has == {2}
    assert not lookup.hear(1, full=True, added=[3], shard_epoch=1, arena_id="arena-2").resync
    assert lookup.has == {3}, "a new arena counts its epochs from one again"


def test_half_an_announcement_is_never_built_upon(lookup):
    broken = replace(said(2, added=[2], removed=[0]), added_parts=b"")
    with pytest.raises(ConfigError):
        lookup.announce(broken, now=0.0)
    assert lookup.hear(3, added=[3]).resync
    assert not lookup.hear(4, full=True, added=[1]).resync
    assert lookup.has == {1}


def test_every_start_has_an_epoch_of_its_own():
    assert Lookup().epoch != Hearing().epoch


def test_a_dropped_shard_is_forgotten_until_it_says_all_again(lookup):
    lookup.drop("a")
    assert lookup.has == set()
    assert lookup.shards() == []
    assert lookup.hear(2, added=[2]).resync
    assert not lookup.hear(3, full=True, added=[2]).resync


def test_status_tells_who_was_heard_when(lookup):
    status = lookup.status(now=1.5)
    assert (status["keys"], status["entries"], status["silent"]) == (2, 2, [])
    assert status["bytes_per_key"] > 0
    assert status["shards"] == {"a": {"entries": 2, "heard_s_ago": 1.5}}


def test_nothing_is_brought_to_a_shard_whose_node_is_to_go_until_it_stays(lookup):
    lookup.hear(1, shard="b", full=True)
    assert lookup.targets(now=0.0) == ["a", "b"]
    lookup.hear(2, is_leaving=True)
    assert lookup.targets(now=0.0) == ["b"]
    assert lookup.status(now=0.0)["leaving"] == ["a"]
    assert lookup.locate(BOTH, now=0.0), "its blocks are found all the same"
    lookup.hear(3)
    assert sorted(lookup.targets(now=0.0)) == ["a", "b"]
    assert lookup.targets(now=LATE) == [], "both are silent"


# -- silence --------------------------------------------------------------------------------------

LATE = SILENT_S + 0.1
BOTH = KEYS[0] + KEYS[1]


def test_a_silent_shard_is_left_out_until_its_next_announcement(lookup):
    assert lookup.match(BOTH, 1, now=SILENT_S).num_blocks == 2
    assert lookup.match(BOTH, 1, now=LATE).num_blocks == 0
    assert lookup.locate(BOTH, now=LATE) == []
    assert lookup.status(now=LATE)["silent"] == ["a"]
    assert not lookup.hear(2, now=LATE).resync
    assert lookup.match(BOTH, 1, now=LATE).num_blocks == 2
    assert lookup.locate(BOTH, now=LATE) == [Run(stop=2, holders={"a": 1})]


def test_the_more_shards_the_longer_each_pauses_and_may_be_silent():
    lookup = Hearing()
    pauses = [lookup.hear(1, full=True, added=[0], shard=f"s{n}").pause_s for n in range(1020)]
    assert pauses[0] == pauses[19] == 0
    assert pauses[-1] == pytest.approx(1000 / CALLS_PER_S)
    assert lookup.match(KEYS[0], 1, now=LATE + 2 * pauses[-1]).num_blocks == 1
    assert lookup.match(KEYS[0], 1, now=LATE + 3 * pauses[-1]).num_blocks == 0


def test_a_silent_shard_that_missed_something_stays_out_until_it_has_said_all(lookup):
    assert lookup.match(BOTH, 1, now=LATE).num_blocks == 0
    assert lookup.hear(3, now=LATE).resync
    assert lookup.match(BOTH, 1, now=LATE).num_blocks == 0
    assert not lookup.hear(4, full=True, added=[0], now=LATE).resync
    assert lookup.match(BOTH, 1, now=LATE).num_blocks == 1


def test_what_another_shard_has_is_found_while_one_is_silent(lookup):
    lookup.hear(1, full=True, shard="b", added=[0], now=LATE)
    assert lookup.match(BOTH, 1, now=LATE).holders == {"b": 1}


def test_a_shard_that_falls_silent_is_visited_once(monkeypatch):
    lookup = Hearing(silent_s=10.0)
    for n in range(10):
        lookup.announce(said(1, full=True, shard=f"s{n}", added=[0]), now=float(n))
    visited: list[str] = []
    monkeypatch.setattr(lookup.index, "set_silent", lambda shard, _: visited.append(shard))
    for _ in range(3):
        lookup.match(KEYS[0], 1, now=12.5)
        assert lookup.status(now=12.5)["silent"] == ["s0", "s1", "s2"]
    assert visited == ["s0", "s1", "s2"]
    lookup.hear(2, shard="s0", now=12.5)
    lookup.locate(KEYS[0], now=13.5)
    assert visited == ["s0", "s1", "s2", "s0", "s3"]


def test_how_long_a_shard_may_be_silent_is_the_callers():
    lookup = Hearing(silent_s=10.0)
    lookup.hear(1, full=True, added=[0, 1])
    assert lookup.match(BOTH, 1, now=9.9).num_blocks == 2
    assert lookup.match(BOTH, 1, now=10.1).num_blocks == 0


def test_shards_are_told_how_many_are_heard(lookup):
    assert lookup.hear(1, full=True, shard="b", now=1.0).num_shards == 2
    assert lookup.hear(2, shard="b", now=LATE).num_shards == 1
    assert lookup.hear(2, now=LATE).num_shards == 2
    lookup.drop("a")
    assert lookup.hear(3, shard="b", now=LATE).num_shards == 1


# -- ranks ----------------------------------------------------------------------------------------


def test_ranks_are_found_where_they_are_registered(lookup):
    lookup.hear(2, ranks=[("r", 0), ("other", 1)])
    lookup.hear(1, full=True, shard="b", ranks=[("r", 1)])
    assert lookup.replica("r", now=0.0) == {0: "a", 1: "b"}
    assert lookup.replica("nobody", now=0.0) == {}
    assert lookup.status(now=0.0)["ranks"] == 3


def test_ranks_stay_until_a_shard_names_others(lookup):
    lookup.hear(2, ranks=[("r", 0)])
    lookup.hear(3)
    assert lookup.replica("r", now=0.0) == {0: "a"}
    lookup.hear(4, ranks=[])
    assert lookup.replica("r", now=0.0) == {}


def test_a_rank_that_moved_is_where_it_was_named_last(lookup):
    lookup.hear(1, full=True, shard="b", ranks=[("r", 0)])
    lookup.hear(2, ranks=[("r", 0)])
    lookup.hear(2, shard="b", ranks=[("r", 0), ("r", 1)])
    assert lookup.replica("r", now=0.0) == {0: "a", 1: "b"}


def test_ranks_of_a_silent_or_dropped_shard_are_left_out(lookup):
    lookup.hear(2, ranks=[("r", 0)])
    assert lookup.replica("r", now=LATE) == {}
    lookup.hear(3, now=LATE)
    assert lookup.replica("r", now=LATE) == {0: "a"}
    lookup.drop("a")
    assert lookup.replica("r", now=LATE) == {}


# -- partial blocks --------------------------------------------------------------------------------


@pytest.fixture
def halves(lookup: Hearing) -> Hearing:
    """A lookup where `a` has part 0 of keys 0 and 1, and `b` has part 1 of them."""
    lookup.hear(1, full=True, shard="b", added=[0, 1], part=1)
    return lookup


def test_a_shard_is_told_once_that_the_other_part_of_its_block_went(halves):
    assert halves.hear(2, removed=[1]).partial_keys == b""
    assert halves.hear(2, shard="b").partial_keys == KEYS[1]
    assert halves.hear(3, shard="b").partial_keys == b""


def test_what_a_silent_shard_has_is_no_partial_block_until_it_is_dropped(halves):
    assert halves.hear(2, shard="b", now=LATE).partial_keys == b""
    halves.drop("a")
    told = halves.hear(3, shard="b", now=LATE).partial_keys
    told += halves.hear(4, shard="b", now=LATE).partial_keys
    assert {told[:32], told[32:]} == {KEYS[0], KEYS[1]}


def test_a_partial_block_whose_part_was_stored_again_is_none(halves):
    halves.hear(2, removed=[0, 1])
    halves.hear(3, added=[1])
    assert halves.hear(2, shard="b").partial_keys == KEYS[0]


def test_what_a_shard_is_still_saying_again_is_no_partial_block(halves):
    halves.hear(5, full=True, added=[0], more=True)
    assert halves.hear(2, shard="b").partial_keys == b""
    halves.hear(6, added=[1])
    assert halves.hear(3, shard="b").partial_keys == b""


def test_what_a_shard_did_not_say_again_is_a_partial_block(halves):
    halves.hear(5, full=True, added=[0], more=True)
    halves.hear(6)
    assert halves.hear(2, shard="b").partial_keys == KEYS[1]


# -- lines that lose, repeat and delay ------------------------------------------------------------


class Announcing:
    """A shard as the lookup sees it, over a line that loses, repeats and delays.

    One announcement has room for two additions; the rest follows in the next.
    """

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.pending: tuple[set[int], set[int]] = set(), set()
        self.epoch, self.sequence = 1, 0
        self.lookup_epoch: str | None = None
        self.on_the_way: list[Announcement] = []

    def change(self, n: int) -> None:
        added, removed = self.pending
        if n in self.held:
            self.held.discard(n)
            (added.discard if n in added else removed.add)(n)
        else:
            self.held.add(n)
            (removed.discard if n in removed else added.add)(n)

    def announce(self) -> Announcement:
        self.sequence += 1
        full = self.lookup_epoch is None
        added, removed = (self.held, set[int]()) if full else self.pending
        now, later = sorted(added)[:2], sorted(added)[2:]
        made = said(
            self.sequence,
            full=full,
            shard_epoch=self.epoch,
            added=now,
            removed=sorted(removed),
            more=bool(later),
        )
        self.pending = set(later), set()
        return made

    def hear(self, answer: Answer | None) -> None:
        self.lookup_epoch = None if answer is None or answer.resync else answer.lookup_epoch


@settings(max_examples=examples(300))
@given(st.data())
def test_whatever_the_line_does_the_index_is_right_once_the_shard_is_heard(data):
    lookup = Hearing()
    shard = Announcing()
    steps = st.sampled_from(["change", "deliver", "lose", "delay", "arrive", "again", "restart"])
    for step in data.draw(st.lists(steps, max_size=25)):
        if step == "change":
            shard.change(data.draw(st.integers(0, len(KEYS) - 1)))
        elif step == "deliver":
            shard.hear(lookup.announce(shard.announce(), now=0.0))
            if shard.lookup_epoch is not None:
                assert lookup.has == shard.held - shard.pending[0]
        elif step == "lose":
            shard.announce()
            shard.hear(None)
        elif step == "delay":
            shard.on_the_way.append(shard.announce())
            shard.hear(None)
        elif step in ("arrive", "again") and shard.on_the_way:
            at = data.draw(st.integers(0, len(shard.on_the_way) - 1))
            lookup.announce(shard.on_the_way[at], now=0.0)
            if step == "arrive":
                del shard.on_the_way[at]
        elif step == "restart":
            lookup = Hearing()
    for _ in range(5):
        shard.hear(lookup.announce(shard.announce(), now=0.0))
    assert lookup.has == shard.held


# -- queues of partial blocks, ranks and turns ----------------------------------------------------


@pytest.fixture
def blocks() -> PartialBlocks:
    return PartialBlocks()


def lose(blocks: PartialBlocks, *numbers: int, shards: tuple[str, ...] = ("a",)) -> None:
    blocks.note([Loss(keys=b"".join(KEYS[n] for n in numbers), parts=1, shards=shards)])


def taken(blocks: PartialBlocks, shard: str = "a") -> list[int]:
    return [KEYS.index(key) for key in split_keys(blocks.take(shard, Index()))]


def test_every_shard_that_has_a_part_is_told_once(blocks):
    lose(blocks, 0, shards=("a", "b"))
    lose(blocks, 1, shards=("b",))
    assert (taken(blocks, "a"), taken(blocks, "b")) == ([0], [0, 1])
    assert (taken(blocks, "a"), taken(blocks, "b")) == ([], [])


def test_an_answer_has_the_oldest_and_the_next_one_goes_on(blocks, monkeypatch):
    monkeypatch.setattr(lookup_module, "HANDED_MAX", 3)
    lose(blocks, 0, 1)
    lose(blocks, 2, 3, 4)
    assert [taken(blocks), taken(blocks), taken(blocks)] == [[0, 1, 2], [3, 4], []]


def test_what_is_too_much_to_wait_drops_the_oldest(blocks, monkeypatch):
    monkeypatch.setattr(lookup_module, "QUEUED_MAX", 3)
    lose(blocks, 0)
    lose(blocks, 1, 2)
    lose(blocks, 3, 4)
    assert taken(blocks) == [2, 3, 4]


def test_a_dropped_shard_is_told_nothing(blocks):
    lose(blocks, 0)
    blocks.drop("a")
    assert taken(blocks) == []


def test_a_rank_that_two_shards_name_is_with_the_later_one_and_there_is_a_bound(monkeypatch):
    monkeypatch.setattr(lookup_module, "RANKS_MAX", 2)
    ranks = RankDirectory()
    ranks.name("a", [("r", 0)])
    ranks.name("b", [("r", 0)])
    ranks.name("a", [("r", rank) for rank in range(5)])
    assert ranks.replica("r", ["a", "b"]) == {0: "b", 1: "a"}
    assert ranks.replica("r", ["a"]) == {0: "a", 1: "a"}


@pytest.fixture
def full() -> Turns:
    """Turns that are all taken at 0."""
    turns = Turns()
    for number in range(TURNS):
        assert turns.take(f"s{number}", 0.0) == 0
    return turns


def test_when_all_turns_are_taken_the_next_is_told_when_to_ask_and_who_has_one_goes_on(full):
    assert 0 < full.take("late", 0.0) < 1
    assert full.take("s0", 1.0) == 0


def test_a_turn_ends_with_the_last_piece(full):
    full.go_on("s3", 1.0, more=True)
    assert full.take("late", 1.0) > 0
    full.go_on("s3", 1.0, more=False)
    assert full.take("late", 1.0) == 0
    assert full.take("later", 1.0) > 0


def test_a_turn_of_one_that_says_nothing_more_ends_by_itself(full):
    for number in range(1, TURNS):
        full.go_on(f"s{number}", TURN_S - 1, more=True)
    assert full.take("late", TURN_S - 0.1) > 0
    assert full.take("late", TURN_S + 0.1) == 0
    assert full.take("later", TURN_S + 0.1) > 0


def test_a_piece_of_one_that_has_no_turn_takes_none():
    turns = Turns()
    for number in range(TURNS):
        turns.go_on(f"other {number}", 0.0, more=True)
    assert turns.take("a", 0.0) == 0


def test_however_many_wait_so_many_ask_in_a_second_and_who_asks_no_more_is_not_waited_for(full):
    asks = [full.take(f"w{number}", 0.0) for number in range(2000)]
    assert asks[0] == 0.5
    for second in range(1, 10):
        assert 199 <= sum(second <= at < second + 1 for at in asks) <= 201
    for number in range(TURNS):
        full.take(f"s{number}", 30.0)
    assert full.take("late", 30.0) == 0.5


def told(heads: list[int], num_partitions: int) -> list[list[int]]:
    """Return for each partition the numbers of the blocks that it is told of."""
    masks = shares(np.array(heads, dtype=np.uint32), num_partitions)
    return [np.flatnonzero([True] * len(heads) if one is None else one).tolist() for one in masks]


@settings(max_examples=examples(90))
@given(st.lists(st.integers(1, 2**24 - 1), max_size=20), st.integers(1, 64))
def test_one_partition_is_told_of_a_block(heads, num_partitions):
    found = told(heads, num_partitions)
    assert len(found) == num_partitions
    assert sorted(block for some in found for block in some) == list(range(len(heads)))


@pytest.mark.parametrize("num_partitions", [1, 2, 64])
def test_all_partitions_are_told_of_a_block_whose_chain_is_not_known(num_partitions):
    assert told([0], num_partitions) == [[0]] * num_partitions


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 64])
def test_the_partition_that_is_told_of_a_chain_is_the_one_that_is_asked(num_partitions):
    for number in range(100):
        keys = chain(3, seed=str(number))
        asked = partition_of(keys[0], num_partitions)
        assert told([head_number(keys[0])], num_partitions)[asked] == [0]


def test_chains_are_spread_over_the_partitions():
    asked = [partition_of(chain(1, seed=str(number))[0], 4) for number in range(400)]
    assert min(np.bincount(asked, minlength=4)) > 50
