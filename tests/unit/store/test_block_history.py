"""What is remembered of blocks that have left."""

import time

import numpy as np
import pytest

from kvray.store.arena.arena import Arena
from kvray.store.arena.owner import ArenaOwner
from kvray.store.block_history import (
    AHEAD,
    CAUSES,
    CLEARED,
    CORRUPT,
    HOST,
    NVME,
    QUOTA,
    WRITER,
    BlockHistory,
)
from tests.unit.store.small_arena import chain, store


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype="<u8")


def test_the_latest_departure_of_a_block_is_told_with_its_time_tier_and_cause() -> None:
    gone = BlockHistory(8)
    gone.note(words(1, 2), HOST, AHEAD, now=10.0)
    gone.note(words(2), NVME, CLEARED, now=20.0)
    found = gone.of(words(2, 1, 3))
    assert found["at"].tolist() == [20.0, 10.0, 0.0]
    assert found["tier"][:2].tolist() == [NVME, HOST]
    assert found["cause"][:2].tolist() == [CLEARED, AHEAD]
    assert gone.counts() == {"ahead": 2, "cleared": 1}


def test_of_a_moment_only_what_left_before_counts() -> None:
    gone = BlockHistory(8)
    gone.note(words(1), HOST, AHEAD, now=10.0)
    gone.note(words(1), HOST, QUOTA, now=20.0)
    assert gone.of(words(1), before=15.0)["at"].tolist() == [10.0]
    assert gone.of(words(1), before=5.0)["at"].tolist() == [0.0]


def test_what_its_owner_noted_is_not_put_down_to_a_writer() -> None:
    gone = BlockHistory(8)
    gone.note(words(1, 2), HOST, AHEAD, now=10.0)
    gone.note_rest(words(2, 3), HOST, np.full(2, WRITER), now=11.0)
    assert gone.of(words(1, 2, 3))["cause"].tolist() == [AHEAD, AHEAD, WRITER]
    # Found once: the next time it was somebody else.
    gone.note_rest(words(2), HOST, np.full(1, WRITER), now=12.0)
    assert gone.of(words(2))["cause"].tolist() == [WRITER]


def test_what_is_noted_of_one_tier_says_nothing_of_the_other() -> None:
    gone = BlockHistory(8)
    gone.note(words(1), HOST, AHEAD, now=10.0)
    gone.note_rest(words(1), NVME, np.full(1, CORRUPT), now=11.0)
    found = gone.of(words(1))
    assert (found["tier"].tolist(), found["cause"].tolist()) == ([NVME], [CORRUPT])


def test_the_oldest_are_forgotten_and_it_is_told_from_when_on_all_are_known() -> None:
    began = time.time()
    gone = BlockHistory(4)
    assert gone.since >= began
    for number in range(6):
        gone.note(words(number), HOST, AHEAD, now=float(number))
    assert gone.of(words(0, 1, 2))["at"].tolist() == [0.0, 0.0, 2.0]
    assert gone.since == 2.0
    gone.note(words(*range(100, 110)), HOST, AHEAD, now=9.0)
    assert gone.of(words(105, 106, 109))["at"].tolist() == [0.0, 9.0, 9.0]


def test_causes_have_their_names() -> None:
    assert (CAUSES[WRITER], CAUSES[QUOTA], CAUSES[CORRUPT]) == ("writer", "quota", "corrupt")


@pytest.mark.parametrize("cleared", [True, False])
def test_an_owner_says_why_blocks_went(arena: Arena, cleared: bool) -> None:
    owner, keys = ArenaOwner(arena), chain(arena.tables.geometry.num_slots)
    store(arena, keys)
    if cleared:
        owner.clear()
    else:
        owner.evict_ahead(1.0)
    found = owner.history.of(np.frombuffer(b"".join(keys), "<u8")[::4])
    assert found["at"].min() > time.time() - 60
    assert {CAUSES[cause] for cause in found["cause"].tolist()} == {
        "cleared" if cleared else "ahead"
    }
