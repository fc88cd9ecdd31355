"""What promises the fewest hits for the time it takes up goes first: see `prompts` and `hazard`.

Source: Aalto, Ayesta and Righter, "On the Gittins index in the M/G/1 queue", 2009, for the index;
Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, for
learning such a thing by age and class of what is cached.
"""

import numpy as np

from kvray.store.policy.policy import Array, Use
from kvray.store.policy.prompts import Prompts

_ROOT, _FOUND, _STORED, _LAST = range(4)
"""Places of the blocks that are watched: the prompt's first block if it was found, another one that
was, one that was stored, and its last."""

_END = 4
"""A prompt that uses all blocks of another but for the last three goes on with it."""


class Gittins:
    """See `Policy`."""

    def __init__(self, num_slots: int) -> None:
        """Rank blocks in slots 0 to `num_slots` - 1."""
        self._prompts = Prompts()
        self._prompt, self._hits, self._depth = np.zeros((3, num_slots), dtype=np.int64)

    def used(self, use: Use) -> None:
        """See `Policy.used`."""
        prompts, slots, names = self._prompts, use.slots, use.names.tolist()
        number = prompts.begin(now=use.now)
        prompts.use(number, names, now=use.now)
        self._hits[slots] += 1
        self._prompt[slots] = number
        num_stored = use.depth + len(slots)
        prompts.measure(
            number, length=use.length, num_stored=num_stored, num_new=use.length - num_stored
        )
        self._watch(number, _ROOT, use, names, 0)
        if len(slots) > 1:
            self._watch(number, _FOUND, use, names, 1 + _any(number, len(slots) - 1))
        if num_stored == use.length:
            self._end(number, use, names)

    def stored(self, use: Use) -> None:
        """See `Policy.stored`."""
        prompts, slots, names = self._prompts, use.slots, use.names.tolist()
        number = int(self._prompt[use.parent]) if use.parent >= 0 else -1
        # Another prompt may have used the parent since. Whose blocks end there, goes on.
        if number < 0 or prompts.num_stored(number) != use.depth:
            number = prompts.begin(now=use.now)
        num_known = prompts.use(number, names, now=use.now)
        length = use.depth + len(slots)
        prompts.measure(number, length=length, num_stored=length, num_new=len(slots) - num_known)
        self._hits[slots] = 0
        self._prompt[slots] = number
        self._depth[slots] = np.arange(use.depth, length)
        if len(slots) > 1:
            self._watch(number, _STORED, use, names, _any(number, len(slots) - 1))
        self._end(number, use, names)

    def freed(self, slots: Array) -> None:
        """See `Policy.freed`."""

    def rank(self, slots: Array, *, now: float) -> Array:
        """See `Policy.rank`."""
        return self._prompts.worth(
            self._prompt.take(slots), self._depth.take(slots), self._hits.take(slots), now=now
        )

    def _end(self, number: int, use: Use, names: list[int]) -> None:
        self._watch(number, _LAST, use, names, len(names) - 1)
        self._prompts.end(number, names[-min(len(names), _END)])

    def _watch(self, number: int, place: int, use: Use, names: list[int], at: int) -> None:
        hits = int(self._hits[use.slots[at]])
        self._prompts.watch(number, place, names[at], hits=hits, depth=use.depth + at)


def _any(number: int, count: int) -> int:
    """Return a number below `count` that follows from `number` by chance."""
    return (number * 0x9E3779B1 % 2**32) * count >> 32
