"""Victims: many are ranked at a time, and what has changed since is looked at again."""

import numpy as np
import pytest

from kvray.store import lease, slots
from kvray.store.policy import LRU
from kvray.store.policy.victims import Victims
from kvray.store.tables import Array, Tables
from tests.unit.store.policy.small_cache import use
from tests.unit.store.small_arena import NOBODY, chain, put, take


class Counting(LRU):
    """LRU that knows how often it was asked."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.num_rankings = 0

    def rank(self, slots: Array, *, now: float) -> Array:
        self.num_rankings += 1
        return super().rank(slots, now=now)


@pytest.fixture
def policy(tables: Tables) -> Counting:
    return Counting(tables.geometry.num_slots)


def fill(tables: Tables, policy: LRU, count: int) -> list[int]:
    """Store single blocks; return their slots, the oldest first."""
    found = []
    for at in range(count):
        made = put(tables, chain(1, seed=f"block {at}"))
        policy.stored(use(made.slots.tolist(), [at]))
        found += made.slots.tolist()
    return found


def taken(victims: Victims, count: int, *, protect: Array = NOBODY) -> list[int]:
    return list(victims.take(count, protect=protect, now=0.0).tolist())


def test_they_go_in_the_order_of_their_ranks(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 20)
    policy.used(use(order[:1], [0]))
    assert taken(Victims(tables, policy, ranked=8), 5) == order[1:6]


def test_many_are_ranked_at_a_time(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 30)
    victims = Victims(tables, policy, ranked=12)
    for start in range(0, 12, 3):
        assert taken(victims, 3) == order[start : start + 3]
        slots.evict(tables, np.array(order[start : start + 3]))
    assert policy.num_rankings == 1
    assert taken(victims, 3) == order[12:15]
    assert policy.num_rankings == 2


def test_more_can_be_wanted_than_are_ranked_at_a_time(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 30)
    assert taken(Victims(tables, policy, ranked=4), 25) == order[:25]


def test_no_more_are_found_than_there_are(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 5)
    assert taken(Victims(tables, policy, ranked=4), 9) == order


def test_of_an_empty_tier_nothing_can_go(tables: Tables, policy: Counting) -> None:
    assert taken(Victims(tables, policy, ranked=4), 3) == []


def test_what_was_used_since_it_was_ranked_is_ranked_again(
    tables: Tables, policy: Counting
) -> None:
    order = fill(tables, policy, 30)
    victims = Victims(tables, policy, ranked=12)
    assert taken(victims, 2) == order[:2]
    slots.evict(tables, np.array(order[:2]))
    tables.slot_tick[order[3]] = tables.next_tick()
    policy.used(use(order[3:4], [3]))
    assert taken(victims, 3) == [order[2], order[4], order[5]]


def test_a_slot_that_has_another_block_by_now_stays(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 30)
    victims = Victims(tables, policy, ranked=12)
    assert taken(victims, 1) == order[:1]
    slots.evict(tables, np.array(order[1:3]))
    made = put(tables, chain(2, seed="new"))
    policy.stored(use(made.slots.tolist(), [100, 101]))
    assert not set(taken(victims, 8)) & set(made.slots.tolist())


def test_protected_and_leased_blocks_stay(tables: Tables, policy: Counting) -> None:
    order = fill(tables, policy, 20)
    victims = Victims(tables, policy, ranked=12)
    assert taken(victims, 1) == order[:1]
    held = take(tables, chain(1, seed="block 2"))
    assert set(taken(victims, 18, protect=np.array([order[4]]))) == set(order) - {
        order[2],
        order[4],
    }
    lease.release(tables, held)


def test_a_parent_that_got_another_child_since_stays(tables: Tables, policy: Counting) -> None:
    keys = chain(3)
    made = put(tables, keys[:2])
    policy.stored(use(made.slots.tolist(), [0, 1]))
    fill(tables, policy, 20)
    victims = Victims(tables, policy, ranked=12)
    assert taken(victims, 1) == [int(made.slots[1])]
    child = put(tables, keys[2:], parent=keys[1], depth=2)
    policy.stored(use(child.slots.tolist(), [2], depth=2, parent=int(made.slots[1])))
    assert not set(taken(victims, 10)) & set(made.slots.tolist())


def test_children_go_first_though_they_rank_above(tables: Tables, policy: Counting) -> None:
    made = put(tables, chain(3))
    policy.stored(use(made.slots.tolist(), [0, 1, 2]))
    order = fill(tables, policy, 2)
    policy.used(use(made.slots[2:].tolist(), [2]))
    assert taken(Victims(tables, policy, ranked=12), 5) == [*order, *made.slots[::-1].tolist()]
