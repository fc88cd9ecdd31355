"""What a policy hears of an arena is what happened there, told by nobody but its tables."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvray.store.arena import key_index, slots
from kvray.store.arena.tables import Array, Tables
from kvray.store.policy import Use
from kvray.store.policy.observer import Observer
from tests.unit.store.small_arena import chain, evict, make_tables, put, reserve, take


class Notes:
    """A policy that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def used(self, use: Use) -> None:
        self.heard.append(("used", use.slots.tolist(), use.depth, use.parent))

    def stored(self, use: Use) -> None:
        self.heard.append(("stored", use.slots.tolist(), use.depth, use.parent))

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        self.heard.append(("copied", slots.tolist(), theirs.tolist()))

    def beside(self, num_slots: int) -> "Notes":
        return Notes()

    def rank(self, slots: Array, *, now: float) -> Array:
        return np.zeros(len(slots))


class Watched:
    """Tables, and what is heard of them at each look."""

    def __init__(self) -> None:
        self.tables = make_tables()
        self.is_busy = False
        self._observer = Observer(lambda: self.tables, self._section)

    @contextlib.contextmanager
    def _section(self) -> Iterator[bool]:
        yield not self.is_busy

    def look(self) -> list[tuple[Any, ...]]:
        notes = Notes()
        self._observer.observe(notes, now=0.0)
        return notes.heard

    def known(self, slots: Array) -> None:
        self._observer.known(slots)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def at(tables: Tables, keys: list[Any], part: int = 0) -> list[int]:
    found: list[int] = key_index.find(tables, key_index.pack_keys(keys), part).tolist()
    return found


def test_a_prompt_is_stored_used_and_extended(watched):
    tables, keys = watched.tables, chain(6)
    put(tables, keys[:4])
    head = at(tables, keys[:4])
    assert watched.look() == [("stored", head, 0, -1)]
    take(tables, keys[:3])
    put(tables, keys[4:], parent=keys[3], depth=4)
    tail = at(tables, keys[4:])
    assert watched.look() == [("used", head[:3], 0, -1), ("stored", tail, 4, head[3])]
    assert watched.look() == []
    assert evict(tables, 1) == 1
    assert watched.look() == []


def test_a_block_is_stored_when_it_can_be_read(watched):
    made = reserve(watched.tables, chain(2))
    assert watched.look() == []
    slots.commit(watched.tables, made, np.zeros(2, dtype="<u8"))
    assert watched.look() == [("stored", made.slots.tolist(), 0, -1)]


def test_two_prompts_are_told_apart_and_in_their_order(watched):
    tables, one, two = watched.tables, chain(3, seed="a"), chain(3, seed="b")
    put(tables, one)
    put(tables, two)
    take(tables, one)
    assert watched.look() == [
        ("stored", at(tables, one), 0, -1),
        ("stored", at(tables, two), 0, -1),
        ("used", at(tables, one), 0, -1),
    ]


def test_who_stores_behind_a_block_does_not_use_it(watched):
    tables, keys = watched.tables, chain(4)
    put(tables, keys[:2])
    watched.look()
    reserve(tables, keys[2:], parent=keys[1], depth=2)
    assert watched.look() == []


def test_a_slot_with_another_block_is_stored_again(watched):
    tables = watched.tables
    keys = chain(64)
    put(tables, keys)
    watched.look()
    evict(tables, 64)
    other = chain(64, seed="other")
    put(tables, other)
    assert watched.look() == [("stored", at(tables, other), 0, -1)]


def test_what_was_given_up_was_not_used(watched):
    put(watched.tables, chain(3))
    watched.look()
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
    first, second = at(tables, keys, 0), at(tables, keys, 1)
    told = watched.look()
    assert told[0] == ("stored", first, 0, -1)
    assert told[1][0] == "copied"
    assert dict(zip(told[1][1], told[1][2], strict=True)) == dict(zip(second, first, strict=True))
    assert len(told) == 2


def test_what_is_known_otherwise_is_not_told_again(watched):
    made = put(watched.tables, chain(3))
    watched.known(made.slots)
    assert watched.look() == []
