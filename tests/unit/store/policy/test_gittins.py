"""Gittins: LRU until it has learned, then by what came back."""

import numpy as np
import pytest

from kvray.store.arena.tables import Array
from kvray.store.policy import Gittins, prompts
from tests.unit.store.policy.small_cache import SmallCache, use

HOT, COLD = np.arange(4), np.arange(100, 108)


def taught(policy: Gittins) -> float:
    """Have one prompt come back every 10 s, and others never; return the time after that."""
    now = 0.0
    policy.stored(use(HOT, HOT, now=now))
    for turn in range(300):
        now += 10.0
        policy.used(use(HOT, HOT, now=now))
        policy.stored(use(COLD, COLD + 1000 * (turn + 1), now=now))
    return now


def rank(policy: Gittins, slots: Array, now: float) -> Array:
    return policy.rank(slots, now=now)


def test_before_the_first_lesson_the_oldest_goes_first() -> None:
    policy = Gittins(30)
    for slot in range(30):
        policy.stored(use([slot], [slot], now=float(slot)))
    policy.used(use([0], [0], now=30.0))
    order = np.argsort(rank(policy, np.arange(30), 31.0))
    assert order.tolist() == [*range(1, 30), 0]


def test_what_always_returns_outranks_what_never_does() -> None:
    policy = Gittins(200)
    now = taught(policy)
    assert rank(policy, HOT, now + 5).min() > 10 * rank(policy, COLD, now + 5).max()


def test_what_has_not_returned_when_it_used_to_falls_in_rank() -> None:
    policy = Gittins(200)
    now = taught(policy)
    assert rank(policy, HOT, now + 5).min() > 10 * rank(policy, HOT, now + 500).max()


def test_chance_is_one_before_the_first_lesson_and_learned_after_it() -> None:
    policy = Gittins(200)
    policy.stored(use(HOT, HOT))
    assert (policy.chance(HOT, now=1000.0) == 1).all()
    now = taught(policy)
    assert policy.chance(HOT, now=now).min() > 0.8
    assert policy.chance(COLD, now=now).max() < 0.2


def test_a_single_block_that_returns_is_seen_to() -> None:
    policy = Gittins(10)
    cache = SmallCache(policy, 10)
    for turn in range(200):
        cache.ask(0, now=10.0 * turn)
        cache.ask(1000 + turn, now=10.0 * turn + 5)
    assert cache.ask(0, now=2000.0)
    hot = cache.slot_of(0)
    assert policy.chance(np.array([hot]), now=2000.0)[0] > 0.8


def test_a_tier_beside_it_knows_what_it_has_learned() -> None:
    host = Gittins(200)
    now = taught(host)
    below = host.beside(50)
    expected = rank(host, np.array([HOT[0], COLD[0]]), now)
    below.copied(np.array([7, 9]), host, np.array([HOT[0], COLD[0]]))
    assert (rank(below, np.array([7, 9]), now) == expected).all()


def test_what_is_stored_after_a_parent_belongs_to_its_prompt() -> None:
    policy = Gittins(20)
    policy.stored(use([0, 1], [10, 11], now=1.0))
    policy.stored(use([2], [12], depth=2, now=2.0, parent=1))
    assert num_prompts(policy) == 1


def test_what_is_stored_after_another_prompts_block_is_a_prompt_of_its_own() -> None:
    policy = Gittins(20)
    policy.stored(use([0, 1, 2], [10, 11, 12], now=1.0))
    policy.stored(use([3], [13], depth=2, now=2.0, parent=1))
    assert num_prompts(policy) == 2


def test_the_number_of_a_prompt_that_is_forgotten_means_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts, "_PROMPTS", 8)
    policy = Gittins(20)
    policy.stored(use([0, 1], [10, 11]))
    for at in range(8):  # the last of these has the row that the first prompt had
        policy.stored(use([2, 3], [20 + 2 * at, 21 + 2 * at], now=1.0 + at))
    before = num_prompts(policy)
    policy.stored(use([4], [12], depth=2, now=10.0, parent=1))
    assert num_prompts(policy) == before + 1


def num_prompts(policy: Gittins) -> int:
    return policy._prompts._count


def test_a_copy_promises_a_tenth_of_the_hits_and_counts_as_ten_times_as_old_before_that() -> None:
    ranks = Gittins(1).rank_of_copies(np.array([5.0, 0.0, -3.0]))
    assert ranks.tolist() == [0.5, 0.0, -30.0]
