"""Of the shards that hold a block exactly one keeps it, whoever looks."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.shard.duplicates import Duplicates, are_duplicates
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.index import Index, Run
from kvray.store import Arena
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.store.retention import Retention
from tests.unit.store.small_arena import chain, make_arena, store

SHARDS = [f"kvray-shard-{number}" for number in range(6)]

holdings = st.lists(
    st.dictionaries(st.sampled_from(SHARDS), st.integers(1, 2**12 - 1), min_size=1), min_size=1
)
"""Of each block: shard -> its parts."""


def names_of(count: int) -> Array:
    digests = [hashlib.sha256(str(number).encode()).digest() for number in range(count)]
    return key_index.pack_keys([BlockKey(digest) for digest in digests])


def runs_of(held: list[dict[str, int]]) -> list[Run]:
    return [Run(stop=row + 1, holders=holders) for row, holders in enumerate(held)]


def keepers(held: list[dict[str, int]], part: int) -> list[list[str]]:
    """Return who, of those that hold the part of each block, finds that it keeps it."""
    names, parts = names_of(len(held)), np.full(len(held), part)
    mask = {shard: are_duplicates(names, parts, runs_of(held), shard) for shard in SHARDS}
    return [
        [shard for shard in SHARDS if holders.get(shard, 0) >> part & 1 and not mask[shard][row]]
        for row, holders in enumerate(held)
    ]


@given(holdings, st.integers(0, 11))
def test_exactly_one_of_those_that_hold_a_part_keeps_it(
    held: list[dict[str, int]], part: int
) -> None:
    for found, holders in zip(keepers(held, part), held, strict=True):
        has_any = any(mask >> part & 1 for mask in holders.values())
        assert len(found) == has_any


@given(holdings, st.sampled_from(SHARDS))
def test_a_holder_that_leaves_changes_only_what_it_kept(
    held: list[dict[str, int]], gone: str
) -> None:
    left = [{shard: 1 for shard in holders if shard != gone} for holders in held]
    before = keepers([dict.fromkeys(holders, 1) for holders in held], 0)
    for old, new, holders in zip(before, keepers(left, 0), left, strict=True):
        if old != [gone]:
            assert new == old
        else:
            assert len(new) == bool(holders)


@given(holdings)
def test_runs_of_equal_holders_may_be_one_or_many(held: list[dict[str, int]]) -> None:
    names, parts = names_of(len(held)), np.arange(len(held)) % 12
    joined: list[Run] = []
    for run in runs_of(held):
        if joined and joined[-1].holders == run.holders:
            joined.pop()
        joined.append(run)
    for shard in SHARDS:
        one_by_one = are_duplicates(names, parts, runs_of(held), shard)
        assert (are_duplicates(names, parts, joined, shard) == one_by_one).all()


def test_what_only_this_shard_has_or_nobody_is_known_to_have_is_no_duplicate() -> None:
    names, parts = names_of(6), np.zeros(6, dtype=np.int64)
    runs = [Run(stop=2, holders={SHARDS[0]: 1}), Run(stop=4, holders={})]
    assert not are_duplicates(names, parts, runs, SHARDS[0]).any()
    assert not are_duplicates(names, parts, [], SHARDS[0]).any()
    assert not len(are_duplicates(names[:0], parts[:0], [], SHARDS[0]))


def test_two_holders_keep_about_half_each() -> None:
    names, parts = names_of(2000), np.zeros(2000, dtype=np.int64)
    runs = [Run(stop=2000, holders=dict.fromkeys(SHARDS[:2], 1))]
    share = are_duplicates(names, parts, runs, SHARDS[0]).mean()
    assert 0.4 < share < 0.6


# -- questions ----------------------------------------------------------------------------------


class Line:
    """A lookup that counts its questions, and may not answer."""

    def __init__(self) -> None:
        self.index = Index()
        self.num_questions = 0
        self.is_silent = False

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert (actor, method) == (LOOKUP_NAME, "locate")
        self.num_questions += 1
        if self.is_silent:
            await asyncio.sleep(60)
        if len(self.index) == 0:
            raise ShardUnavailable("The lookup is cut off.")
        return self.index.locate(b"".join(args))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = make_arena(tmp_path)
    made.join("shard")
    yield made
    made.close()


def run_with(arena: Arena, line: Line, num_shards: int) -> Retention:
    """Tick often for a moment, in which two rounds are due; return who was told."""
    retention = Retention(arena, "lru", "all")
    retention.observe()

    async def main() -> None:
        duplicates = Duplicates(retention, shard="a", ask=line.ask, num_shards=lambda: num_shards)
        for number in range(100):
            duplicates.tick(number / 50, free_share=1.0)
            await asyncio.sleep(0.002)
        await duplicates.close()
        await duplicates.close()

    asyncio.run(main())
    return retention


def test_what_goes_next_is_asked_about_once_for_some_time(arena: Arena) -> None:
    line, keys = Line(), chain(56)
    made = store(arena, keys)
    for shard in "ab":
        line.index.add(shard, b"".join(keys), [0] * len(keys))
    retention = run_with(arena, line, 2)
    assert line.num_questions == 1, "an eighth of 56 blocks goes next, in one stretch"
    duplicate = retention.are_duplicates(made.slots)
    assert duplicate.sum() in (0, 7)
    names = key_index.pack_keys(keys[32:33])
    runs = [Run(stop=1, holders={"a": 1, "b": 1})]
    assert duplicate.any() == are_duplicates(names, np.zeros(1, dtype=np.int64), runs, "a")[0]


def test_nobody_is_asked_by_a_shard_that_is_alone(arena: Arena) -> None:
    line = Line()
    store(arena, chain(56))
    run_with(arena, line, 1)
    assert line.num_questions == 0


def test_a_lookup_that_fails_is_asked_again_later_and_nothing_is_a_duplicate(arena: Arena) -> None:
    line = Line()
    made = store(arena, chain(56))
    retention = run_with(arena, line, 2)
    assert line.num_questions == 1
    assert not retention.are_duplicates(made.slots).any()


def test_a_question_without_an_answer_is_ended_by_closing(arena: Arena) -> None:
    line = Line()
    line.is_silent = True
    store(arena, chain(56))
    run_with(arena, line, 2)
    assert line.num_questions == 1
