"""What a replica's own pool most likely still has, judged by what was routed there; pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class PoolGuess:
    """The blocks of the prompts that one replica got, the oldest first out.

    Engines say little of their pools. They evict leaves before their parents and what was used
    long ago before what was used lately, so a pool of known size is easy to guess.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # Oldest first.
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many blocks it most likely has."""
        return len(self._keys)

    def leading(self, keys: Sequence[Hashable]) -> int:
        """Return how many leading blocks of a prompt it most likely has."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def note(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Note that a prompt with these blocks uses the pool; return the blocks that went.

        Of a prompt larger than the pool, the leading blocks stay.
        """
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        count = len(self._keys) - self._num_blocks
        return [self._keys.popitem(last=False)[0] for _ in range(count)]

    def clear(self) -> None:
        """Forget all blocks, because the engine started over."""
        self._keys.clear()
