"""A bounded set of blocks, the least recently used one out first; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from typing import Generic, TypeVar

_Block = TypeVar("_Block", bound=Hashable)


class Lru(Generic[_Block]):
    """The blocks of prompts, those of the oldest first out, and leaves before their parents.

    Engines evict so. They say little of their pools, but one of known size is easy to guess.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # Oldest first.
        self._blocks: OrderedDict[_Block, None] = OrderedDict()

    def __contains__(self, block: _Block) -> bool:
        return block in self._blocks

    def leading(self, blocks: Sequence[_Block]) -> int:
        """Return how many of a prompt's leading blocks are here.

        No block is here without its parents, which were used whenever it was, and after it.
        """
        return leading(blocks, self._blocks)

    def use(self, blocks: Sequence[_Block]) -> list[_Block]:
        """Note that a prompt uses these blocks; return the blocks that went for them.

        Of a prompt that is too large, the leading blocks stay.
        """
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        count = len(self._blocks) - self._num_blocks
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]


def leading(blocks: Sequence[_Block], held: Container[_Block]) -> int:
    """Return how many leading blocks are held; none is without those before it."""
    if not blocks or blocks[0] not in held:
        return 0  # which is most often so
    return bisect_left(range(len(blocks)), True, key=lambda at: blocks[at] not in held)
