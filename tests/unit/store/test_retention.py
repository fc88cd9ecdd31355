"""What a block is worth to who stored it, and whose it is: kept as long as it is here."""

import numpy as np
import pytest

from kvray.block import namespace_id
from kvray.errors import ConfigError
from kvray.store import Arena, ArenaOwner, repair, slots
from kvray.store.layout import DEFAULT_PRIORITY
from kvray.store.tables import Array, Tables
from tests.unit.store.small_arena import SLOT, chain, find, put, reserve, store


def priorities(tables: Tables, found: Array) -> list[int]:
    return list(tables.slot_priority[found].tolist())


def test_blocks_of_which_nothing_is_said_have_the_engines_default(tables: Tables) -> None:
    made = put(tables, chain(2))
    assert priorities(tables, made.slots) == [DEFAULT_PRIORITY] * 2 == [35] * 2
    assert not tables.slot_namespace[made.slots].any()


def test_every_block_has_its_own_priority(tables: Tables) -> None:
    put(tables, chain(1), priority=7)
    made = put(tables, chain(4), priority=np.array([7, 90, 0, 100], dtype=np.uint8), namespace=9)
    assert priorities(tables, made.slots) == [90, 0, 100]
    assert tables.slot_namespace[made.slots].tolist() == [9, 9, 9]


def test_the_higher_priority_holds_of_a_block_that_is_stored_again(tables: Tables) -> None:
    keys = chain(3)
    made = put(tables, keys, priority=np.array([10, 50, 90], dtype=np.uint8))
    put(tables, keys, priority=50)
    assert priorities(tables, made.slots) == [50, 50, 90]
    put(tables, keys, priority=np.array([60, 20, 100], dtype=np.uint8))
    assert priorities(tables, made.slots) == [60, 50, 100]


def test_the_higher_priority_holds_of_a_block_that_another_is_writing(tables: Tables) -> None:
    keys = chain(2)
    made = reserve(tables, keys, priority=10)
    reserve(tables, keys, priority=20)
    assert priorities(tables, made.slots) == [20, 20]


def test_a_slots_next_block_takes_nothing_over_from_the_last(tables: Tables) -> None:
    made = put(tables, chain(2), priority=100, namespace=5)
    slots.free(tables, made.slots)
    tables.undo.settle()
    again = put(tables, chain(2, seed="other"), priority=1)
    assert sorted(again.slots.tolist()) == sorted(made.slots.tolist())
    assert priorities(tables, again.slots) == [1, 1]
    assert not tables.slot_namespace[again.slots].any()


def test_a_rebuild_keeps_priorities_and_namespaces(tables: Tables) -> None:
    keys, asked = chain(5), np.array([1, 2, 3, 4, 5], dtype=np.uint8)
    put(tables, keys, priority=asked, namespace=77)
    reserve(tables, chain(2, seed="under way"), priority=80, namespace=78)
    repair.rebuild(tables, now=0.0)
    assert priorities(tables, np.array(find(tables, keys))) == asked.tolist()
    assert tables.slot_namespace[find(tables, keys)].tolist() == [77] * 5
    pending = find(tables, chain(2, seed="under way"))
    assert priorities(tables, np.array(pending)) == [80, 80]


def test_the_next_owner_finds_priorities_and_namespaces_as_they_were(arena: Arena) -> None:
    made = store(arena, chain(3), priority=60, namespace=2**32 - 1)
    ArenaOwner(arena).adopt()
    assert priorities(arena.tables, made.slots) == [60] * 3
    assert arena.tables.slot_namespace[made.slots].tolist() == [2**32 - 1] * 3


@pytest.mark.parametrize("priority", [-1, 101, np.array([1, 2]), np.array([0, 50, 101])])
def test_what_is_no_priority_is_refused(arena: Arena, priority: int | Array) -> None:
    with pytest.raises(ConfigError, match="0 to 100"):
        arena.reserve(chain(3), parent=None, depth=0, part=0, block_bytes=SLOT, priority=priority)
    assert find(arena.tables, chain(3)) == [-1, -1, -1]


def test_a_namespace_is_known_by_the_start_of_its_digest() -> None:
    assert namespace_id(bytes.fromhex("01020304") + bytes(28)) == 0x04030201
