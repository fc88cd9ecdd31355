"""Tells policies the events in an arena, as far as its tables show them.

A lease of a prefix gives all its blocks one tick, and a store gives its blocks one number. Blocks
that got the same one since the last look belong to one prompt. So writers and readers send nothing
and pay nothing. Of two uses between two looks only the later is seen.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from kvray.store.arena import key_index
from kvray.store.arena.layout import NO_SLOTS, READY, Array
from kvray.store.arena.tables import EventReader, Tables
from kvray.store.policy.admission import Admission
from kvray.store.policy.policy import Policy, Use

Section = Callable[[], AbstractContextManager[bool]]
"""Keeps the tables still; False: not now."""

_NAMESPACES_MAX = 4096
"""The parts of so many namespaces are remembered; then they are learned again."""


class _Rows(NamedTuple):
    """Rows of the tables of the changed slots."""

    slots: Array
    tick: Array
    number: Array
    is_ready: Array
    name: Array
    part: Array
    depth: Array
    parent: Array
    namespace: Array


_NO_ROWS = _Rows(*[NO_SLOTS] * len(_Rows._fields))


class Seen(NamedTuple):
    """Slots whose blocks are new since the last look, and those whose blocks were used."""

    new: Array
    used: Array


class Observer:
    """Looks at the tables of one tier; single-threaded.

    A block of several parts is one block to a policy. The policy hears of the lowest part; the
    slots of the other parts copy its facts.
    """

    def __init__(self, tables: Callable[[], Tables], section: Section) -> None:
        """Start with nothing seen: existing blocks count as stored at the first look.

        `tables` returns the tier's; they are not kept, for they may be mapped memory.
        """
        self._tables = tables
        self._section = section
        num_slots = tables().geometry.num_slots
        self._events = EventReader()
        # Of the blocks that were seen: the low halves of their last use and their number. 0: none.
        self._tick, self._number = np.zeros((2, num_slots), dtype=np.uint32)
        # Namespace -> its parts, ascending.
        self._parts: dict[int, list[int]] = {}

    @property
    def is_behind(self) -> bool:
        """Whether there are slots that were not looked at yet: a look goes through a piece."""
        return self._events.is_behind(self._tables())

    def observe(self, policy: Policy, *others: Policy | Admission, now: float) -> Seen | None:
        """Tell the events since the last look; None: the tables are busy.

        `others` hear of uses as well. `now` is on the policy's clock.
        """
        rows = self._changed()
        if rows is None or not len(rows.slots):
            return None if rows is None else Seen(NO_SLOTS, NO_SLOTS)
        slots = rows.slots
        number, tick = _low(rows.number), rows.tick.astype(np.uint32)
        is_new = rows.is_ready & (self._number[slots] != number)
        is_used = rows.is_ready & (tick != self._tick[slots]) & (rows.tick != rows.number)
        # A store gives its tick to the blocks before it: that is no use. 0: it was given up.
        is_used &= (rows.tick != 0) & ~np.isin(rows.tick, rows.number)
        self._tick[slots], self._number[slots] = tick, np.where(rows.is_ready, number, 0)
        is_first = self._are_first(rows)
        events = [(when, True, run) for when, run in _runs(rows, rows.number, is_new & is_first)]
        events += [(when, False, run) for when, run in _runs(rows, rows.tick, is_used & is_first)]
        for _, is_stored, run in sorted(events, key=lambda event: event[0]):
            depth, parent = int(rows.depth[run[0]]), int(rows.parent[run[0]])
            use = Use(slots[run], rows.name[run], depth, depth + len(run), now, parent)
            for one in (policy, *others):
                (one.stored if is_stored else one.used)(use)
        self._copy_to_other_parts((policy, *others), slots[is_new | is_used])
        return Seen(slots[is_new], slots[is_used])

    def has_seen(self, slots: Array) -> Array:
        """Return a mask of the `slots` whose blocks the policy was told of."""
        seen: Array = self._number.take(slots) == _low(self._tables().slot_number.take(slots))
        return seen

    def known(self, slots: Array) -> None:
        """Count these slots as seen: the policy learned of their blocks in another way."""
        tables = self._tables()
        self._tick[slots] = tables.slot_tick[slots].astype(np.uint32)
        self._number[slots] = _low(tables.slot_number[slots])

    def _changed(self) -> _Rows | None:
        tables = self._tables()
        if not self._events.has_more(tables):
            return _NO_ROWS
        with self._section() as entered:
            if not entered:
                return None
            slots = self._events.take(tables)
            is_ready, tick = tables.slot_state.take(slots) == READY, tables.slot_tick.take(slots)
            is_changed = is_ready & (tick.astype(np.uint32) != self._tick[slots])
            is_changed |= is_ready != (self._number[slots] > 0)
            is_changed |= is_ready & ~self.has_seen(slots)
            slots = slots[is_changed]
            return _Rows(
                slots=slots,
                tick=tick[is_changed],
                number=tables.slot_number[slots],
                is_ready=is_ready[is_changed],
                name=tables.slot_key[slots, 0].view(np.int64),
                part=tables.slot_part[slots],
                depth=tables.slot_depth[slots].astype(np.int64),
                parent=tables.parents(slots),
                namespace=tables.slot_namespace[slots],
            )

    def _are_first(self, rows: _Rows) -> Array:
        """Return a mask of the blocks whose part is the lowest that its namespace has here."""
        is_first = np.zeros(len(rows.slots), dtype=bool)
        if len(self._parts) > _NAMESPACES_MAX:
            self._parts.clear()
        for namespace in np.unique(rows.namespace[rows.is_ready]).tolist():
            mine = rows.namespace == namespace
            parts = {*self._parts.get(namespace, ()), *rows.part[mine & rows.is_ready].tolist()}
            self._parts[namespace] = sorted(parts)
            is_first |= mine & (rows.part == min(parts))
        return is_first

    def _copy_to_other_parts(self, observers: Sequence[Policy | Admission], slots: Array) -> None:
        """Copy the facts of blocks' first part to their other parts."""
        tables = self._tables()
        namespaces = tables.slot_namespace[slots]
        for namespace in np.unique(namespaces).tolist():
            parts = self._parts.get(namespace, [])
            if len(parts) < 2:
                continue
            first, *others = parts
            mine = slots[namespaces == namespace]
            keys = np.unique(tables.slot_key[mine], axis=0)
            theirs = key_index.find(tables, keys, first)
            for part in others:
                copies = key_index.find(tables, keys, part)
                both = (theirs >= 0) & (copies >= 0)
                for one in observers:
                    one.copied(copies[both], one, theirs[both])


def _low(numbers: Array) -> Array:
    """Return the low halves of reservations' numbers, u4, never 0: enough to tell two apart."""
    low = numbers.astype(np.uint32)
    low[low == 0] = 1
    return low


def _runs(rows: _Rows, by: Array, mask: Array) -> list[tuple[int, Array]]:
    """Return the rows in `mask` that follow each other in a prompt, in prefix order.

    `by` tells prompts apart and gives the time of each; it comes first.
    """
    chosen = np.flatnonzero(mask)
    if not len(chosen):
        return []
    chosen = chosen[np.lexsort((rows.depth[chosen], rows.part[chosen], by[chosen]))]
    breaks = np.diff(by[chosen]) != 0
    breaks |= np.diff(rows.part[chosen].astype(np.int64)) != 0
    breaks |= np.diff(rows.depth[chosen]) != 1
    return [(int(by[run[0]]), run) for run in np.split(chosen, np.flatnonzero(breaks) + 1)]
