"""The blocks of an arena that another node keeps too, by the lookup's latest answers. Pure."""

from typing import NamedTuple

import numpy as np

from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables

_AGAIN_S = 10.0
"""Time between two questions about a block."""
_VALID_S = 30.0
"""Time that an answer counts: two lost answers in between do no harm."""


class Question(NamedTuple):
    """Blocks of an arena to ask the lookup about."""

    slots: Array
    """i8 [num_blocks]."""
    numbers: Array
    """The slots' numbers, which change with their blocks, u8 [num_blocks]."""
    ticks: Array
    """Times of their last use, u8 [num_blocks]."""
    keys: Array
    """u8 [num_blocks, 4]."""
    parts: Array
    """[num_blocks]."""
    names: Array
    """Keys of the first blocks of their stretches, u8 [num_blocks, 4]."""


class DuplicateBlocks:
    """Questions and answers about the blocks of an arena; single-threaded.

    `ask` shares nothing with the rest, so it may run in another thread. An answer about a slot ends
    with its block, with the block's next use, because used blocks are to stay, and after
    `_VALID_S`.
    """

    def __init__(self, num_slots: int) -> None:
        self._asked_number, self._said_number, self._said_tick = np.zeros((3, num_slots), "<u8")
        self._asked_at, self._duplicate_at = np.full((2, num_slots), -np.inf)

    def ask(self, tables: Tables, slots: Array, *, now: float) -> Question:
        """Return those of `slots` that a question is due about, and note that it was asked.

        Reads without the arena's lock and leaves out blocks that change meanwhile. It also leaves
        out blocks whose stretch does not begin here, such as those of a sliding window: they count
        as last copies.
        """
        same = self._asked_number[slots] == tables.slot_number[slots]
        slots = slots[~same | (self._asked_at[slots] <= now - _AGAIN_S)]
        numbers = tables.slot_number[slots]
        # In prompt order, where neighbours mostly have the same holders.
        order = np.lexsort((tables.slot_depth[slots], numbers))
        slots, numbers = slots[order], numbers[order]
        ticks, keys = tables.slot_tick[slots], tables.slot_key[slots]
        parts, heads = tables.slot_part[slots], stretch_heads(tables, slots)
        names = tables.slot_key[heads]
        # While a block stays so do its ancestors, and then all of this belongs together.
        stayed = (tables.slot_state[slots] == READY) & (tables.slot_number[slots] == numbers)
        stayed &= heads >= 0
        rows = slots, numbers, ticks, keys, parts, names
        question = Question(*(column[stayed] for column in rows))
        self._asked_number[question.slots] = question.numbers
        self._asked_at[question.slots] = now
        return question

    def note(self, question: Question, mask: Array, *, now: float) -> None:
        """Note an answer: a mask of the blocks in question, set for duplicates."""
        slots = question.slots
        self._said_number[slots], self._said_tick[slots] = question.numbers, question.ticks
        self._duplicate_at[slots] = np.where(mask, now, -np.inf)

    def among(self, tables: Tables, slots: Array, *, now: float) -> Array:
        """Return a mask of the `slots` with known duplicates."""
        is_duplicate: Array = self._duplicate_at[slots] > now - _VALID_S
        if is_duplicate.any():
            is_duplicate &= self._said_number[slots] == tables.slot_number[slots]
            is_duplicate &= self._said_tick[slots] == tables.slot_tick[slots]
            is_duplicate &= tables.slot_state[slots] == READY
        return is_duplicate


def stretch_heads(tables: Tables, slots: Array) -> Array:
    """Return the first slot of each block's stretch, -1 where that is not here.

    A prompt's stretches are its first block, the second, the next two, four, eight and so on. All
    nodes agree on them, and a stretch goes or stays in one piece. Were each block judged by itself,
    some child that stays would keep nearly all others from going.
    """
    depth = tables.slot_depth[slots].astype(np.int64)
    starts = np.where(depth > 0, 1 << np.maximum(np.frexp(depth)[1] - 1, 0).astype(np.int64), 0)
    heads, left = slots.astype(np.int64), depth - starts
    np.minimum(left, len(tables.slot_depth), out=left)
    rows = np.flatnonzero(left)
    while len(rows):
        heads[rows] = tables.parents(heads[rows])
        left[rows] -= 1
        rows = rows[(left[rows] > 0) & (heads[rows] >= 0)]
    # Read without the lock: the slot may have another block by now.
    heads[tables.slot_depth[heads] != starts] = -1
    return heads
