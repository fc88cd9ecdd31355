"""LRU is what a dict makes of it."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.store.policy import LRU
from tests.unit.store.policy.small_cache import SmallCache, use, zipf


def dict_hits(names: Sequence[int], num_blocks: int) -> list[bool]:
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for name in names:
        hits.append(name in cached)
        cached[name] = None
        cached.move_to_end(name)
        if len(cached) > num_blocks:
            cached.popitem(last=False)
    return hits


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 8))
def test_single_blocks_are_kept_as_in_a_dict(names: list[int], num_blocks: int) -> None:
    assert SmallCache(LRU(num_blocks), num_blocks).hits(names) == dict_hits(names, num_blocks)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_string_has_the_hits_of_a_dict(seed: int) -> None:
    names = zipf(seed, 5000)
    assert SmallCache(LRU(100), 100).hits(names) == dict_hits(names, 100)


def test_blocks_of_one_use_have_one_rank() -> None:
    policy = LRU(4)
    policy.stored(use([2, 0, 3], [10, 11, 12]))
    policy.used(use([2, 0], [10, 11]))
    ranks = policy.rank(np.array([2, 0, 3]), now=0.0)
    assert ranks[0] == ranks[1] > ranks[2]


def test_the_clock_goes_on_in_both_tiers() -> None:
    host = LRU(2)
    below = host.beside(2)
    host.stored(use([0], [10]))
    below.stored(use([0], [11]))
    host.stored(use([1], [12]))
    below.copied(np.array([1]), host, np.array([1]))
    assert list(np.argsort(below.rank(np.array([1, 0]), now=0.0))) == [1, 0]
    host.copied(np.array([1]), below, np.array([0]))
    assert list(np.argsort(host.rank(np.array([1, 0]), now=0.0))) == [1, 0]
