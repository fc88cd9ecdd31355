"""Which blocks of an arena another node keeps as well, as it was said lately. Pure."""

from dataclasses import dataclass

import numpy as np

from kvray.store.layout import READY
from kvray.store.tables import Array, Tables

_AGAIN_S = 10.0
"""After which it is asked about a block again."""
_VALID_S = 30.0
"""For how long an answer counts: two that fail to come may be done without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Blocks of an arena, of which it is not known whether another node keeps them."""

    slots: Array
    """Where they are, i8 [num_blocks]."""
    numbers: Array
    """Which block of those that come and go there, u8 [num_blocks]."""
    ticks: Array
    """When they were used last, u8 [num_blocks]."""
    keys: Array
    """u8 [num_blocks, 4]."""
    parts: Array
    """Of each block the part that is in its slot, [num_blocks]."""
    names: Array
    """The keys of the blocks that their stretches begin with, u8 [num_blocks, 4]."""


class SpareBlocks:
    """What was asked about the blocks of an arena, and said; single-threaded.

    `ask` shares nothing with the rest, so it may be called in a thread of its own.

    What is remembered of a slot ends with the block in it. That it is spare ends sooner: with its
    next use, for only what is not used is to go, and after `_VALID_S`.
    """

    def __init__(self, num_slots: int) -> None:
        """Have asked nothing."""
        self._asked_number, self._said_number, self._said_tick = np.zeros((3, num_slots), "<u8")
        self._asked_at, self._spare_at = np.full((2, num_slots), -np.inf)

    def ask(self, tables: Tables, slots: Array, *, now: float) -> Question:
        """Return those of `slots` that are to be asked about, and note that they were.

        Without the arena's lock: what changes meanwhile is left out. So is a block whose stretch
        does not begin here, as that of a sliding window may not: it counts as not spare.
        """
        same = self._asked_number[slots] == tables.slot_number[slots]
        slots = slots[~same | (self._asked_at[slots] <= now - _AGAIN_S)]
        numbers = tables.slot_number[slots]
        # In the order of their prompts, in which neighbours are mostly held alike.
        order = np.lexsort((tables.slot_depth[slots], numbers))
        slots, numbers = slots[order], numbers[order]
        ticks, keys = tables.slot_tick[slots], tables.slot_key[slots]
        parts, heads = tables.slot_part[slots], stretch_heads(tables, slots)
        names = tables.slot_key[heads]
        # While a block stays, those before it in its prompt do: then all of this belongs together.
        stayed = (tables.slot_state[slots] == READY) & (tables.slot_number[slots] == numbers)
        stayed &= heads >= 0
        question = Question(
            slots=slots[stayed],
            numbers=numbers[stayed],
            ticks=ticks[stayed],
            keys=keys[stayed],
            parts=parts[stayed],
            names=names[stayed],
        )
        self._asked_number[question.slots] = question.numbers
        self._asked_at[question.slots] = now
        return question

    def note(self, question: Question, spare: Array, *, now: float) -> None:
        """Note the answer: a mask of the blocks that were asked about."""
        slots = question.slots
        self._said_number[slots], self._said_tick[slots] = question.numbers, question.ticks
        self._spare_at[slots] = np.where(spare, now, -np.inf)

    def among(self, tables: Tables, slots: Array, *, now: float) -> Array:
        """Return a mask of the `slots` whose blocks are known to be spare."""
        is_spare: Array = self._spare_at[slots] > now - _VALID_S
        if is_spare.any():
            is_spare &= self._said_number[slots] == tables.slot_number[slots]
            is_spare &= self._said_tick[slots] == tables.slot_tick[slots]
            is_spare &= tables.slot_state[slots] == READY
        return is_spare


def stretch_heads(tables: Tables, slots: Array) -> Array:
    """Return where the stretches begin that the blocks in `slots` belong to, -1 where not here.

    A prompt's stretches are its first block, the second, the next two, four, eight and so on. The
    nodes that hold a prompt agree on them, and so much of it goes or stays in one piece: if each
    block were judged by itself, some child that stays would keep nearly all others from going.
    """
    depth = tables.slot_depth[slots].astype(np.int64)
    starts = np.where(depth > 0, 1 << np.maximum(np.frexp(depth)[1] - 1, 0).astype(np.int64), 0)
    heads, left = slots.astype(np.int64), depth - starts
    rows = np.flatnonzero(left)
    while len(rows):
        heads[rows] = tables.slot_parent[heads[rows]]
        left[rows] -= 1
        rows = rows[(left[rows] > 0) & (heads[rows] >= 0)]
    # Seen without the lock, it may be the way to another block by now.
    heads[tables.slot_depth[heads] != starts] = -1
    return heads
