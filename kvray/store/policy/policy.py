"""Policies decide which blocks of a tier go first; `kvray replay` says how well each does.

`LRU` lets the block go first that was used longest ago.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvray.store.arena.layout import Array


class Use(NamedTuple):
    """Consecutive blocks of one prompt that were found in a tier, or stored there."""

    slots: Array
    """Their slots, in prefix order."""
    names: Array
    """The first 8 bytes of each block's key, i64; they also name blocks that have left the tier."""
    depth: int
    """The first block's place in the prompt."""
    length: int
    """Blocks of the prompt, as far as is known."""
    now: float
    """Seconds, on any clock that does not go back."""
    parent: int = -1
    """Slot of the block before the first one; -1: it is the prompt's first."""


class Policy(Protocol):
    """Ranks the blocks of one tier. Single-threaded, no clock, no I/O.

    It knows slots by their numbers, not their families: the caller makes sure that a parent goes
    after its children. An event that a policy does not define does nothing.
    """

    def used(self, use: Use) -> None:
        """Note that a prompt found these blocks in the tier: its leading ones."""

    def stored(self, use: Use) -> None:
        """Note that these blocks of a prompt are in the tier from now on."""

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        """Copy the facts of blocks from `source`, the policy of another tier that has them too.

        `beside` made one of the two from the other. `slots` are here, `theirs` there.
        """

    def beside(self, num_slots: int) -> "Policy":
        """Return a policy for another tier of the same prompts."""

    def rank(self, slots: Array, *, now: float) -> Array:
        """Return a number for each of `slots`, f8: the lowest goes first.

        `now` is in seconds, on the clock of `Use.now`.
        """

    def rank_of_copies(self, ranks: Array) -> Array:
        """Return the ranks of blocks that other nodes have too, from those they would have alone.

        What such a block saves is the way from there, not its computing.
        """
        return ranks


class LRU(Policy):
    """Least recently used."""

    def __init__(self, num_slots: int, clock: Iterator[int] | None = None) -> None:
        """`clock` counts uses; tiers share it."""
        self._clock = count(1) if clock is None else clock
        self._last = np.zeros(num_slots)

    def used(self, use: Use) -> None:
        self._last[use.slots] = next(self._clock)

    def stored(self, use: Use) -> None:
        self.used(use)

    def copied(self, slots: Array, source: "LRU", theirs: Array) -> None:
        self._last[slots] = source._last[theirs]

    def beside(self, num_slots: int) -> "LRU":
        return LRU(num_slots, self._clock)

    def rank(self, slots: Array, *, now: float) -> Array:
        last: Array = self._last[slots]
        return last
