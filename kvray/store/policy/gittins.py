"""Lets the block go first that promises the fewest hits for its time: see `prompts` and `hazard`.

Source: Gittins, "Bandit processes and dynamic allocation indices", 1979, for the index; Beckmann,
Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, for learning
it by age and class of cached objects.
"""

import numpy as np

from kvray.store.arena.layout import Array
from kvray.store.policy.policy import Policy, Use
from kvray.store.policy.prompts import Prompts, low

_ROOT, _FOUND, _STORED, _LAST = range(4)
"""Places of the watched blocks: the prompt's first block if it was found, another found one, a
stored one, and its last."""

_HITS_MAX = 255

_COPY_WORTH = 0.1
"""What a copy is worth of its original: the way from another node costs some tenth of computing."""

_END = 4
"""A prompt continues another if it uses all blocks of it but the last three."""


class Gittins(Policy):
    """Ranks by the hits that a block promises for the time it takes up its place."""

    def __init__(self, num_slots: int, prompts: Prompts | None = None) -> None:
        self._prompts = Prompts() if prompts is None else prompts
        # Nine bytes a slot: of a prompt's number only the low half.
        self._prompt, self._depth = np.zeros((2, num_slots), dtype=np.uint32)
        self._hits = np.zeros(num_slots, dtype=np.uint8)

    def used(self, use: Use) -> None:
        prompts, slots, names = self._prompts, use.slots, use.names.tolist()
        number = prompts.begin(now=use.now)
        prompts.use(number, names, now=use.now)
        self._hits[slots] = np.minimum(self._hits[slots], _HITS_MAX - 1) + 1
        self._prompt[slots] = low(number)
        self._depth[slots] = np.arange(use.depth, use.depth + len(slots))
        num_stored = use.depth + len(slots)
        num_new = use.length - num_stored
        prompts.measure(number, length=use.length, num_stored=num_stored, num_new=num_new)
        self._watch(number, _ROOT, use, names, 0)
        if len(slots) > 1:
            self._watch(number, _FOUND, use, names, 1 + _any(number, len(slots) - 1))
        if num_stored == use.length:
            self._end(number, use, names)

    def stored(self, use: Use) -> None:
        prompts, slots, names = self._prompts, use.slots, use.names.tolist()
        number = -1  # of the prompt whose leading blocks came before these, or a new one
        if use.parent >= 0:
            number = prompts.number_of(int(self._prompt[use.parent]))
        # Another prompt may have used the parent since: then that one does not end there.
        if number < 0 or prompts.num_stored(number) != use.depth:
            number = prompts.begin(now=use.now)
        num_known = prompts.use(number, names, now=use.now)
        length = use.depth + len(slots)
        prompts.measure(number, length=length, num_stored=length, num_new=len(slots) - num_known)
        self._hits[slots] = 0
        self._prompt[slots] = low(number)
        self._depth[slots] = np.arange(use.depth, length)
        if len(slots) > 1:
            self._watch(number, _STORED, use, names, _any(number, len(slots) - 1))
        self._end(number, use, names)

    def copied(self, slots: Array, source: "Gittins", theirs: Array) -> None:
        self._prompt[slots], self._depth[slots] = source._prompt[theirs], source._depth[theirs]
        self._hits[slots] = source._hits[theirs]

    def beside(self, num_slots: int) -> "Gittins":
        return Gittins(num_slots, self._prompts)

    def rank(self, slots: Array, *, now: float) -> Array:
        return self._prompts.worth(*self._of(slots), now=now)

    def rank_of_copies(self, ranks: Array) -> Array:
        # Negative ones are ages: of what lasts ten times as long, a tenth comes back in a second.
        return np.where(ranks > 0, ranks * _COPY_WORTH, ranks / _COPY_WORTH)

    def chance(self, slots: Array, *, now: float) -> Array:
        """Return how likely the blocks in `slots` are to be used again, 0 to 1."""
        return self._prompts.chance(*self._of(slots), now=now)

    def _of(self, slots: Array) -> tuple[Array, Array, Array]:
        return self._prompt.take(slots), self._depth.take(slots), self._hits.take(slots)

    def _end(self, number: int, use: Use, names: list[int]) -> None:
        self._watch(number, _LAST, use, names, len(names) - 1)
        self._prompts.end(number, names[-min(len(names), _END)])

    def _watch(self, number: int, place: int, use: Use, names: list[int], at: int) -> None:
        hits = int(self._hits[use.slots[at]])
        self._prompts.watch(number, place, names[at], hits=hits, depth=use.depth + at)


def _any(number: int, count: int) -> int:
    """Return a pseudo-random number below `count`, made from `number`."""
    return (number * 0x9E3779B1 % 2**32) * count >> 32
