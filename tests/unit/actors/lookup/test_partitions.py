import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.lookup.partitions import partition_of, shares
from kvray.identity.block import head_number
from tests.examples import examples
from tests.unit.store.small_arena import chain


def told(heads: list[int], num_partitions: int) -> list[list[int]]:
    """Return for each partition the numbers of the blocks that it is told of."""
    masks = shares(np.array(heads, dtype=np.uint32), num_partitions)
    return [np.flatnonzero([True] * len(heads) if one is None else one).tolist() for one in masks]


@settings(max_examples=examples(90))
@given(st.lists(st.integers(1, 2**24 - 1), max_size=20), st.integers(1, 64))
def test_one_partition_is_told_of_a_block(heads: list[int], num_partitions: int) -> None:
    found = told(heads, num_partitions)
    assert len(found) == num_partitions
    assert sorted(block for some in found for block in some) == list(range(len(heads)))


@pytest.mark.parametrize("num_partitions", [1, 2, 64])
def test_all_partitions_are_told_of_a_block_whose_chain_is_not_known(num_partitions: int) -> None:
    assert told([0], num_partitions) == [[0]] * num_partitions


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 64])
def test_the_partition_that_is_told_of_a_chain_is_the_one_that_is_asked(
    num_partitions: int,
) -> None:
    for number in range(100):
        keys = chain(3, seed=str(number))
        asked = partition_of(keys[0], num_partitions)
        assert told([head_number(keys[0])], num_partitions)[asked] == [0]


def test_chains_are_spread_over_the_partitions() -> None:
    asked = [partition_of(chain(1, seed=str(number))[0], 4) for number in range(400)]
    assert min(np.bincount(asked, minlength=4)) > 50
