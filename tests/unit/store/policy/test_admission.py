"""Admission to the disk: everything, what leaves twice, and what is likely to come back."""

import numpy as np
import pytest

from kvray.store.arena.tables import Array
from kvray.store.policy import ADMISSIONS, LRU, Everything, Gittins, Likely, Policy, Twice
from tests.unit.store.policy.small_cache import use


def admits(admission: Everything | Twice | Likely, slots: list[int], names: list[int]) -> list[int]:
    """Return the names that are admitted."""
    mask: Array = admission.admits(np.array(slots), np.array(names, dtype=np.int64), now=0.0)
    assert (mask.dtype, mask.shape) == (bool, (len(slots),))
    return list(np.array(names)[mask])


@pytest.mark.parametrize("name", ADMISSIONS)
@pytest.mark.parametrize("policy", [LRU(4), Gittins(4)], ids=["lru", "gittins"])
def test_every_admission_decides_on_no_blocks(name: str, policy: Policy) -> None:
    none = np.empty(0, dtype=np.int64)
    mask = ADMISSIONS[name](4, policy).admits(none, none, now=0.0)
    assert (mask.dtype, mask.shape) == (bool, (0,))


def test_everything_admits_everything() -> None:
    assert admits(Everything(4, LRU(4)), [2, 0], [10, 11]) == [10, 11]


def test_what_was_found_since_it_was_stored_is_admitted() -> None:
    twice = Twice(4, LRU(4))
    twice.stored(use([0, 1, 2], [10, 11, 12]))
    twice.used(use([0, 1], [10, 11]))
    assert admits(twice, [0, 1, 2], [10, 11, 12]) == [10, 11]


def test_what_leaves_for_the_second_time_is_admitted() -> None:
    twice = Twice(4, LRU(4))
    twice.stored(use([0], [10]))
    assert admits(twice, [0], [10]) == []
    twice.stored(use([3], [10]))
    assert admits(twice, [3], [10]) == [10]


def test_a_block_does_not_count_what_another_was_found_in_its_slot() -> None:
    twice = Twice(4, LRU(4))
    twice.stored(use([0], [10]))
    twice.used(use([0], [10]))
    twice.stored(use([0], [11]))
    assert admits(twice, [0], [11]) == []


def test_as_many_are_remembered_as_there_are_slots_and_the_latest() -> None:
    twice = Twice(3, LRU(3))
    for name in (10, 11, 12, 13):
        assert admits(twice, [0], [name]) == []
    assert admits(twice, [0, 1], [11, 13]) == [11, 13]
    assert admits(twice, [0], [10]) == []


def test_what_leaves_again_unadmitted_is_remembered_again() -> None:
    twice = Twice(2, LRU(2))
    for name in (10, 11, 12, 10):
        assert admits(twice, [0], [name]) == []
    assert admits(twice, [0], [13]) == []
    assert admits(twice, [0], [10]) == [10]


HOT, COLD = [0, 1, 2], [10, 11, 12, 13]


def taught(policy: Policy, likely: Likely) -> float:
    """Have a prompt come back every 10 s and others never; return the time after that."""
    now = 0.0
    for observer in (policy, likely):
        observer.stored(use(HOT, HOT))
    for turn in range(300):
        now += 10.0
        cold = [1000 * (turn + 1) + slot for slot in COLD]
        for observer in (policy, likely):
            observer.used(use(HOT, HOT, now=now))
            observer.stored(use(COLD, cold, now=now))
    return now


@pytest.mark.parametrize("make", [LRU, Gittins])
def test_what_is_likely_to_come_back_is_admitted(make: type[LRU] | type[Gittins]) -> None:
    policy = make(20)
    likely = Likely(20, policy)
    now = taught(policy, likely)
    slots = np.array(HOT + COLD)
    mask = likely.admits(slots, slots, now=now)
    assert slots[mask].tolist() == HOT


def test_before_it_has_learned_everything_is_likely() -> None:
    likely = Likely(20, LRU(20))
    likely.stored(use(HOT, HOT))
    assert admits(likely, HOT, HOT) == HOT


def test_it_does_not_tell_the_policy_what_that_knows_already() -> None:
    alone, policy = Gittins(20), Gittins(20)
    now = taught(policy, Likely(20, policy))
    taught(alone, Likely(20, LRU(20)))
    slots = np.array(HOT + COLD)
    assert (policy.rank(slots, now=now) == alone.rank(slots, now=now)).all()
