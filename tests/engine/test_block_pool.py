"""Reference counts and the prefix tree stay true under any order of calls."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvray.errors import CapacityError
from kvray.lab.reference.block_pool import BlockPool

SIZE = 2
NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; `content` is what each block would hold in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, tokens_per_block=SIZE)
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), is_partial=st.booleans())
    def add(self, tokens: list[int], is_partial: bool) -> None:
        match = self.pool.match(tokens[:-1], namespace=None, allow_partial=is_partial)
        held = list(match.block_ids)
        for index, block_id in enumerate(held):
            assert self.content[block_id] == tuple(tokens[: (index + 1) * SIZE])
        if match.partial_block_id is not None:
            end = len(held) * SIZE + match.num_partial_tokens
            assert end < len(tokens)
            assert self.content[match.partial_block_id][:end] == tuple(tokens[:end])
        self.pool.reference(held)
        count = -(-len(tokens) // SIZE) - len(held)
        free = self.pool.num_free
        try:
            fresh = self.pool.allocate(count)
        except CapacityError:
            assert count > free
            assert self.pool.num_free == free
            self.pool.release(held)
            return
        in_use = {block_id for _, block_ids in self.sequences for block_id in block_ids}
        assert not in_use & set(fresh)
        block_ids = held + fresh
        for index, block_id in enumerate(block_ids):
            self.content[block_id] = tuple(tokens[: (index + 1) * SIZE])
        self.sequences.append((tokens, block_ids))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_remembered=st.booleans(), keep_tail=st.booleans())
    def end(self, data: st.DataObject, is_remembered: bool, keep_tail: bool) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        tokens, block_ids = self.sequences.pop(index)
        if is_remembered:
            self.pool.remember(tokens, block_ids, namespace=None, keep_tail=keep_tail)
        self.pool.release(block_ids)

    @invariant()
    def free_blocks_are_those_that_nobody_holds(self) -> None:
        in_use = {block_id for _, block_ids in self.sequences for block_id in block_ids}
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)


TestPool = PoolMachine.TestCase


def test_least_recently_used_tail_goes_first() -> None:
    pool = BlockPool(4, tokens_per_block=SIZE)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2]):
        block_ids = pool.allocate(2)
        pool.remember(tokens, block_ids, namespace=None, keep_tail=False)
        pool.release(block_ids)
    pool.release(pool.allocate(1))
    lengths = [
        len(pool.match(tokens, namespace=None, allow_partial=False).block_ids)
        for tokens in ([1, 1, 1, 1], [2, 2, 2, 2])
    ]
    assert lengths == [1, 2]


def test_allocation_beyond_the_free_blocks_changes_nothing() -> None:
    pool = BlockPool(2, tokens_per_block=SIZE)
    with pytest.raises(CapacityError, match="2 free blocks of 2, 3 are needed"):
        pool.allocate(3)
    assert pool.num_free == 2
