"""The blocks of the prompts that a replica has under way; pure."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvray.routing.lru import leading

_Block = TypeVar("_Block", bound=Hashable)


class Coming(Generic[_Block]):
    """What an engine's pool has or will have before it comes to a prompt that is sent now.

    Its events tell of a block after it is computed, and it keeps those of prompts under way.
    """

    def __init__(self) -> None:
        self._blocks: Counter[_Block] = Counter()

    def leading(self, blocks: Sequence[_Block]) -> int:
        """Return how many of a prompt's leading blocks are here."""
        return leading(blocks, self._blocks)

    def add(self, blocks: Sequence[_Block]) -> None:
        """Note a prompt that is sent."""
        self._blocks.update(blocks)

    def remove(self, blocks: Sequence[_Block]) -> None:
        """Note its end."""
        for block in blocks:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
