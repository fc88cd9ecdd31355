import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.lookup import lookup as lookup_module
from kvray.actors.lookup.delta import Delta, Poll, packed_parts, partition_of, shares
from kvray.actors.lookup.lookup import CALLS_PER_S, SILENT_S, Lookup
from kvray.errors import ConfigError
from kvray.identity.block import BlockKey, head_number, split_keys
from kvray.index import Loss, Run
from tests.examples import examples
from tests.unit.store.small_arena import chain

KEYS = [BlockKey(hashlib.sha256(bytes([n])).digest()) for n in range(5)]


class Hearing(Lookup):
    """A lookup of the shards `a` and `b`, at the time 0 if nothing else is told."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        super().__init__(silent_s, clock=lambda: self.now)
        self.now = 0.0
        self.keep("ab")
        self.number = 0

    def at(self, now: float) -> "Hearing":
        """Return itself, at that time."""
        self.now = now
        return self

    def ask(self, shard: str = "a") -> Poll:
        return self.poll(shard, 0, 100)

    def hear(self, shard: str = "a", **fields: Any) -> int:
        """Take a reply, to the cursor that counts; return how many steps that took.

        `added` and `removed` are numbers of keys.
        """
        known = self._shards.get(shard)
        added, removed = fields.pop("added", []), fields.pop("removed", [])
        part, self.number = fields.pop("part", 0), self.number + 1
        made = {
            "since": None if known is None else known.cursor,
            "cursor": ("log", self.number),
            "more": False,
            "added_keys": b"".join(KEYS[n] for n in added),
            "added_parts": packed_parts([part] * len(added)),
            "removed_keys": b"".join(KEYS[n] for n in removed),
            "removed_parts": packed_parts([part] * len(removed)),
        } | fields
        return len(list(self.take(shard, Delta(**made))))

    @property
    def has(self) -> set[int]:
        return {n for n, key in enumerate(KEYS) if self.index.match(key, 1).num_blocks}


@pytest.fixture
def lookup() -> Hearing:
    """A lookup that has keys 0 and 1 of shard `a`."""
    made = Hearing()
    made.hear(is_full=True, added=[0, 1])
    return made


@pytest.mark.parametrize("since", [None, ("log", 0), ("other", 1)])
def test_a_reply_to_another_cursor_is_ignored(lookup, since):
    assert lookup.hear(since=since, added=[2]) == 0
    assert lookup.has == {0, 1}
    assert lookup.ask().cursor == ("log", 1)
    assert lookup.ask("b").cursor is None, "it knows nothing of it"


def test_a_list_of_all_blocks_replaces_what_the_shard_had_and_leaves_others_alone(lookup):
    lookup.hear("b", is_full=True, added=[3])
    lookup.hear(is_full=True, added=[4])
    assert lookup.has == {3, 4}
    assert lookup.status()["resyncs"] == 3


def test_a_reply_is_taken_in_steps_and_half_of_one_is_never_built_upon(lookup):
    lookup.step_keys = 2
    assert lookup.hear(added=[2, 3, 4], removed=[0]) == 3
    assert lookup.has == {1, 2, 3, 4}
    with pytest.raises(ConfigError, match="one each"):
        lookup.hear(removed=[1], added=[0], added_parts=b"")
    assert lookup.ask().cursor is None
    lookup.hear(is_full=True, added=[1])
    assert lookup.has == {1}


def test_each_shard_is_told_of_the_namespaces_of_all(lookup):
    lookup.hear("b", is_full=True, namespaces=(7, 9))
    lookup.hear(namespaces=(7, 8))
    assert set(lookup.ask().namespaces) == {7, 8, 9}
    lookup.keep("a")
    assert set(lookup.ask().namespaces) == {7, 8}


def test_a_shard_that_is_gone_is_forgotten_until_it_says_all_again(lookup):
    lookup.keep("b")
    assert (lookup.has, lookup.shards()) == (set(), [])
    lookup.hear(since=None, is_full=True, added=[2])
    assert lookup.has == set(), "a reply that is late"
    lookup.keep("ab")
    assert lookup.ask().cursor is None


def test_status_tells_who_was_heard_when(lookup):
    status = lookup.at(1.5).status()
    assert (status["keys"], status["entries"], status["silent"]) == (2, 2, [])
    assert status["bytes_per_key"] > 0
    assert status["shards"] == {"a": {"entries": 2, "heard_s_ago": 1.5}}


def test_nothing_is_brought_to_a_shard_whose_node_is_to_go_until_it_stays(lookup):
    lookup.hear("b", is_full=True)
    assert lookup.targets() == ["a", "b"]
    lookup.hear(is_leaving=True)
    assert lookup.targets() == ["b"]
    assert lookup.status()["leaving"] == ["a"]
    assert lookup.locate(BOTH), "its blocks are found all the same"
    lookup.hear()
    assert lookup.targets() == ["a", "b"]


# -- silence --------------------------------------------------------------------------------------

LATE = SILENT_S + 0.1
BOTH = KEYS[0] + KEYS[1]


def test_a_shard_that_does_not_answer_its_poll_is_left_out_until_it_does(lookup):
    assert lookup.at(100.0).match(1, BOTH).num_blocks == 2, "nobody has asked it"
    lookup.at(0.0).ask()
    lookup.at(1.0).ask()  # again, since the first one failed
    assert lookup.at(SILENT_S).match(1, BOTH).num_blocks == 2
    assert lookup.at(LATE).match(1, BOTH).num_blocks == 0
    assert lookup.locate(BOTH) == lookup.targets() == []
    assert lookup.status()["silent"] == ["a"]
    lookup.hear("b", is_full=True, added=[0])
    assert lookup.match(1, BOTH).holders == {"b": 1}, "what another one has is found"
    lookup.hear("b", is_full=True)
    lookup.hear()
    assert lookup.match(1, BOTH).num_blocks == 2
    assert lookup.locate(BOTH) == [Run(stop=2, holders={"a": 1})]


def test_a_reply_in_many_steps_is_heard_at_once(lookup):
    lookup.ask()
    reply = Delta(since=("log", 1), cursor=("log", 3), added_keys=KEYS[2], added_parts=b"\0\0")
    next(lookup.at(1.0).take("a", reply))
    assert lookup.at(LATE).status()["silent"] == []


def test_the_more_shards_the_longer_each_pauses_and_may_be_silent(lookup):
    assert lookup.ask().pace_s == 0
    lookup.keep(["a", *(f"s{n}" for n in range(1019))])
    assert lookup.ask().pace_s == pytest.approx(1000 / CALLS_PER_S)
    assert lookup.at(SILENT_S + 3 * 2.4).match(1, BOTH).num_blocks == 2
    assert lookup.at(SILENT_S + 3 * 2.6).match(1, BOTH).num_blocks == 0


def test_a_shard_that_falls_silent_is_visited_once(monkeypatch):
    lookup = Hearing(silent_s=10.0)
    lookup.keep(shards := [f"s{n}" for n in range(10)])
    for n, shard in enumerate(shards):
        lookup.hear(shard, is_full=True, added=[0])
        lookup.at(float(n)).ask(shard)
    visited: list[str] = []
    monkeypatch.setattr(lookup.index, "set_silent", lambda shard, _: visited.append(shard))
    for _ in range(3):
        lookup.at(12.5).match(1, KEYS[0])
        assert lookup.at(12.5).status()["silent"] == ["s0", "s1", "s2"]
    assert visited == ["s0", "s1", "s2"]


def test_shards_are_told_how_many_are_heard(lookup):
    assert lookup.ask("b").num_shards == 2, "itself too"
    lookup.hear("b", is_full=True)
    assert lookup.ask("a").num_shards == 2
    assert lookup.at(LATE).ask("b").num_shards == 1
    lookup.at(LATE).hear("a")
    assert lookup.at(LATE).ask("b").num_shards == 2
    lookup.keep("b")
    assert lookup.at(LATE).ask("b").num_shards == 1


# -- ranks ----------------------------------------------------------------------------------------


def test_ranks_are_found_where_they_were_named_last_until_others_are(lookup, monkeypatch):
    monkeypatch.setattr(lookup_module, "RANKS_MAX", 2)
    lookup.hear("b", is_full=True, ranks=(("r", 0),))
    lookup.hear(ranks=(("r", 0), ("other", 1)))
    assert lookup.status()["ranks"] == 3
    lookup.hear("b", ranks=tuple(("r", rank) for rank in range(5)))
    assert lookup.replica("r") == {0: "a", 1: "b"}, "as many as are kept"
    assert lookup.replica("nobody") == {}
    lookup.hear("b", ranks=(("r", 1),))
    lookup.hear()
    assert lookup.replica("r") == {1: "b"}


def test_a_rank_is_where_it_was_named_last_whichever_shard_that_is(lookup):
    for shard, other in ("ab", "ba"):
        for one in "ab":
            lookup.hear(one)
        for one in (other, shard, other):
            lookup.hear(one, ranks=(("r", 0),))
        assert lookup.replica("r") == {0: shard}


def test_ranks_of_a_shard_that_is_silent_or_gone_are_where_they_were_named_before(lookup):
    lookup.hear("b", is_full=True, ranks=(("r", 0),))
    lookup.hear(ranks=(("r", 0), ("r", 1)))
    lookup.ask()
    assert lookup.at(LATE).replica("r") == {0: "b"}
    lookup.at(LATE).hear(ranks=(("r", 0),))
    assert lookup.at(LATE).replica("r") == {0: "a"}
    lookup.keep("b")
    assert lookup.at(LATE).replica("r") == {0: "b"}


# -- partial blocks --------------------------------------------------------------------------------


def taken(lookup: Hearing, shard: str = "a") -> list[int]:
    """Return the partial blocks that a shard is told of now."""
    return [KEYS.index(key) for key in split_keys(lookup.ask(shard).partial_keys)]


@pytest.fixture
def halves(lookup: Hearing) -> Hearing:
    """A lookup where `a` has part 0 of keys 0 and 1, and `b` has part 1 of them."""
    lookup.hear("b", is_full=True, added=[0, 1], part=1)
    return lookup


def test_what_a_silent_shard_has_is_no_partial_block_until_the_shard_is_gone(halves):
    halves.ask()
    halves.at(LATE).match(1, KEYS[0])
    assert taken(halves, "b") == []
    halves.keep("b")
    halves.hear("b")
    assert sorted(taken(halves, "b")) == [0, 1]


def test_a_partial_block_whose_part_was_stored_again_is_none(halves):
    halves.hear(removed=[0, 1])
    halves.hear(added=[1])
    assert taken(halves, "b") == [0]


def test_what_a_shard_is_still_listing_is_no_partial_block_until_it_has_listed_all(halves):
    halves.hear(is_full=True, added=[0], more=True)
    assert taken(halves, "b") == []
    halves.hear()
    assert taken(halves, "b") == [1]


def lose(lookup: Lookup, *numbers: int, shards: tuple[str, ...] = ("a",)) -> None:
    lookup._note_losses([Loss(keys=b"".join(KEYS[n] for n in numbers), parts=1, shards=shards)])


def test_every_shard_that_has_a_part_is_told_once():
    blocks = Hearing()
    lose(blocks, 0, shards=("a", "b", "gone"))
    lose(blocks, 1, shards=("b",))
    blocks.keep(["a", "b", "gone"])
    assert taken(blocks, "gone") == [], "nothing is queued for a shard that is gone"
    assert [taken(blocks, shard) for shard in "abab"] == [[0], [0, 1], [], []]


def test_a_poll_has_the_oldest_of_those_that_may_wait_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(lookup_module, "QUEUED_MAX", 4)
    monkeypatch.setattr(lookup_module, "HANDED_MAX", 3)
    blocks = Hearing()
    for lost in ((0,), (1, 2), (3, 4)):
        lose(blocks, *lost)
    assert [taken(blocks), taken(blocks), taken(blocks)] == [[1, 2, 3], [4], []]


# -- partitions -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 64])
def test_the_partition_that_is_told_of_a_chain_is_the_one_that_is_asked(num_partitions):
    assert told([0], num_partitions) == [[0]] * num_partitions, "if it is not known, all are"
    for number in range(100):
        keys = chain(3, seed=str(number))
        asked = partition_of(keys[0], num_partitions)
        assert told([head_number(keys[0])], num_partitions)[asked] == [0]


def test_chains_are_spread_over_the_partitions():
    asked = [partition_of(chain(1, seed=str(number))[0], 4) for number in range(400)]
    assert min(np.bincount(asked, minlength=4)) > 50
