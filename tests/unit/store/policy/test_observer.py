"""What a policy hears of an arena is what happened there, told by nobody but its tables."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvray.store.arena import slots
from kvray.store.arena.tables import Array, Tables
from kvray.store.policy import LRU, Use
from kvray.store.policy.observer import Observer
from tests.unit.store.small_arena import chain, evict, find, put, reserve, take


class Notes(LRU):
    """A policy that writes down what it hears."""

    def __init__(self) -> None:
        super().__init__(64)
        self.heard: list[tuple[Any, ...]] = []

    def used(self, use: Use) -> None:
        self.heard.append(("used", use.slots.tolist(), use.depth, use.parent))

    def stored(self, use: Use) -> None:
        self.heard.append(("stored", use.slots.tolist(), use.depth, use.parent))

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        self.heard.append(("copied", slots.tolist(), theirs.tolist()))


class Watched:
    """Tables, and what is heard of them at each look."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.is_busy = False
        self.observer = Observer(lambda: tables, lambda: nullcontext(not self.is_busy))

    def look(self) -> list[tuple[Any, ...]]:
        notes = Notes()
        self.observer.observe(notes, now=0.0)
        return notes.heard


@pytest.fixture
def watched(tables: Tables) -> Watched:
    return Watched(tables)


def test_a_prompt_is_stored_used_and_extended(watched):
    tables, keys = watched.tables, chain(6)
    put(tables, keys[:4])
    head = find(tables, keys[:4])
    assert watched.look() == [("stored", head, 0, -1)]
    take(tables, keys[:3])
    put(tables, keys[4:], parent=keys[3], depth=4)
    tail = find(tables, keys[4:])
    assert watched.look() == [("used", head[:3], 0, -1), ("stored", tail, 4, head[3])]
    assert watched.look() == []
    assert evict(tables, 1) == 1
    assert watched.look() == []


def test_a_slot_with_another_block_is_stored_again(watched):
    tables, other = watched.tables, chain(64, seed="other")
    put(tables, chain(64))
    watched.look()
    evict(tables, 64)
    put(tables, other)
    assert watched.look() == [("stored", find(tables, other), 0, -1)]


def test_two_prompts_are_told_apart_and_in_their_order(watched):
    tables, one, two = watched.tables, chain(3, seed="a"), chain(3, seed="b")
    put(tables, one)
    put(tables, two)
    take(tables, one)
    told = (("stored", one), ("stored", two), ("used", one))
    assert watched.look() == [(what, find(tables, keys), 0, -1) for what, keys in told]


def test_who_stores_behind_a_block_does_not_use_it_and_stores_when_it_can_be_read(watched):
    tables, keys = watched.tables, chain(4)
    head = put(tables, keys[:2])
    watched.look()
    made = reserve(tables, keys[2:], parent=keys[1], depth=2)
    assert watched.look() == []
    slots.commit(tables, made, np.zeros(2, dtype="<u8"))
    assert watched.look() == [("stored", made.slots.tolist(), 2, head.slots[-1])]


def test_what_was_given_up_was_not_used_and_what_is_known_is_not_told(watched):
    put(watched.tables, chain(3))
    watched.look()
    watched.observer.known(put(watched.tables, chain(3, seed="known")).slots)
    assert watched.look() == []
    watched.tables.slot_tick[:] = 0
    assert watched.look() == []


def test_busy_tables_are_looked_at_the_next_time(watched):
    put(watched.tables, chain(3))
    watched.is_busy = True
    assert watched.look() == []
    watched.is_busy = False
    assert [what for what, *_ in watched.look()] == ["stored"]


def test_parts_of_a_block_are_one_block(watched):
    tables, keys = watched.tables, chain(2)
    put(tables, keys, part=1)
    put(tables, keys, part=0)
    first, second = find(tables, keys, 0), find(tables, keys, 1)
    stored, (what, *copies) = watched.look()
    assert stored == ("stored", first, 0, -1)
    assert what == "copied"
    assert dict(zip(*copies, strict=True)) == dict(zip(second, first, strict=True))
