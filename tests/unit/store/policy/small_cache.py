"""A cache of single blocks under a policy, and what its tests tell policies."""

from collections.abc import Sequence

import numpy as np

from kvray.store.policy import Policy, Use


def use(
    slots: Sequence[int],
    names: Sequence[int],
    *,
    depth: int = 0,
    length: int | None = None,
    now: float = 0.0,
    parent: int = -1,
) -> Use:
    """Return a `Use` of all blocks of a prompt, or of those from `depth` on."""
    return Use(
        np.array(slots, dtype=np.int64),
        np.array(names, dtype=np.int64),
        depth,
        depth + len(slots) if length is None else length,
        now,
        parent,
    )


class SmallCache:
    """Slots for single blocks, each of which is a prompt of its own; it is always kept full."""

    def __init__(self, policy: Policy, num_blocks: int) -> None:
        self.policy = policy
        self._num_blocks = num_blocks
        self.slots: dict[int, int] = {}

    def ask(self, name: int, *, now: float) -> bool:
        """Return whether a block is there, and store it if not."""
        slot = self.slots.get(name)
        if slot is not None:
            self.policy.used(use([slot], [name], now=now))
            return True
        if len(self.slots) == self._num_blocks:
            names = list(self.slots)
            slots = np.array([self.slots[one] for one in names])
            gone = int(self.policy.rank(slots, now=now).argmin())
            slot = self.slots.pop(names[gone])
        else:
            slot = len(self.slots)
        self.slots[name] = slot
        self.policy.stored(use([slot], [name], now=now))
        return False
