"""What was said of blocks that another node keeps counts for those blocks, and for a while."""

import numpy as np

from kvray.store.arena.tables import Array, Tables
from kvray.store.duplicates import DuplicateBlocks, stretch_heads
from tests.unit.store.small_arena import chain, evict, find, make_tables, put, take


def told(tables: Tables, duplicates: DuplicateBlocks, *, now: float) -> Array:
    """Ask about all blocks, and say that every other one is duplicate; return which."""
    everything = np.flatnonzero(tables.slot_state)
    question = duplicates.ask(tables, everything, now=now)
    assert len(question.slots) == len(everything)
    mask = np.arange(len(everything)) % 2 == 0
    duplicates.note(question, mask, now=now)
    return question.slots[mask]


def among(tables: Tables, duplicates: DuplicateBlocks, *, now: float) -> list[int]:
    everything = np.arange(tables.geometry.num_slots)
    return list(everything[duplicates.among(tables, everything, now=now)].tolist())


def test_what_is_said_counts_for_half_a_minute() -> None:
    tables = make_tables()
    put(tables, chain(6))
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    assert among(tables, duplicates, now=0.0) == []
    said = told(tables, duplicates, now=100.0)
    assert among(tables, duplicates, now=129.0) == sorted(said.tolist())
    assert among(tables, duplicates, now=131.0) == []


def test_a_later_answer_replaces_an_earlier_one() -> None:
    tables = make_tables()
    put(tables, chain(6))
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    told(tables, duplicates, now=100.0)
    question = duplicates.ask(tables, np.arange(6), now=111.0)
    duplicates.note(question, np.zeros(6, dtype=bool), now=111.0)
    assert among(tables, duplicates, now=111.0) == []


def test_a_block_is_asked_about_again_only_after_a_while() -> None:
    tables = make_tables()
    put(tables, chain(6))
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    assert len(duplicates.ask(tables, np.arange(6), now=100.0).slots) == 6
    assert len(duplicates.ask(tables, np.arange(6), now=109.0).slots) == 0
    assert len(duplicates.ask(tables, np.arange(6), now=110.0).slots) == 6


def test_another_block_in_its_slot_is_no_duplicate_and_is_asked_about() -> None:
    tables = make_tables(num_slabs=1)
    put(tables, chain(6, seed="old"))
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    told(tables, duplicates, now=100.0)
    evict(tables, 6)
    assert among(tables, duplicates, now=100.0) == []
    put(tables, chain(6, seed="new"))
    assert among(tables, duplicates, now=100.0) == []
    assert len(duplicates.ask(tables, np.arange(6), now=100.0).slots) == 6


def test_an_answer_that_came_too_late_says_nothing_of_the_block_that_came() -> None:
    tables = make_tables(num_slabs=1)
    put(tables, chain(6, seed="old"))
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    question = duplicates.ask(tables, np.arange(6), now=100.0)
    evict(tables, 6)
    put(tables, chain(6, seed="new"))
    duplicates.note(question, np.ones(6, dtype=bool), now=100.0)
    assert among(tables, duplicates, now=100.0) == []


def test_a_block_that_is_used_is_no_duplicate_any_more() -> None:
    tables = make_tables()
    keys = chain(6)
    put(tables, keys)
    duplicates = DuplicateBlocks(tables.geometry.num_slots)
    said = told(tables, duplicates, now=100.0)
    take(tables, keys[:3])
    used = find(tables, keys[:3])
    assert among(tables, duplicates, now=100.0) == sorted(set(said.tolist()) - set(used))


def test_a_question_names_each_block_by_the_first_of_its_stretch() -> None:
    tables = make_tables()
    keys = chain(13)
    put(tables, keys)
    everything = np.array(find(tables, keys))
    heads = [0, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8]
    assert stretch_heads(tables, everything).tolist() == everything[heads].tolist()
    question = DuplicateBlocks(tables.geometry.num_slots).ask(tables, everything[::-1], now=0.0)
    assert question.keys.tobytes() == b"".join(keys)
    assert question.names.tobytes() == b"".join(keys[head] for head in heads)


def test_a_block_without_the_beginning_of_its_stretch_is_not_asked_about() -> None:
    tables = make_tables()
    keys = chain(6)
    put(tables, keys[3:], depth=3)
    everything = np.array(find(tables, keys[3:]))
    assert stretch_heads(tables, everything).tolist() == [-1, *everything[[1, 1]].tolist()]
