"""(key, part) -> slot: batches, buckets that are shared or full, removals."""

import threading
import time

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.identity.block import BlockKey
from kvray.store.arena import key_index
from kvray.store.arena.layout import BUCKET_WAYS, FREE, READY, RESERVED, RUN_SLOTS
from kvray.store.arena.tables import Array, Tables
from tests.unit.store.small_arena import SLOT, chain, find, make_tables, put


def name_slots(tables: Tables, keys: Array, parts: "int | list[int]" = 0) -> Array:
    """Give the first slots of the table these keys and parts, as a reservation does."""
    slots = np.arange(len(keys))
    tables.slot_key[slots], tables.slot_part[slots] = keys, parts
    return slots


def same_bucket(count: int) -> Array:
    """Return keys that differ but share their first 8 bytes, and so their bucket."""
    keys = np.zeros((count, 4), dtype="<u8")
    keys[:, 0] = 77
    keys[:, 1:] = np.arange(1, count + 1)[:, None]
    return keys


def insert(tables: Tables, slots: Array) -> Array:
    """Enter slots under the keys and parts that they name."""
    return key_index.insert(tables, slots, tables.slot_key[slots], tables.slot_part[slots])


def test_what_was_inserted_is_found_in_any_order(tables: Tables) -> None:
    keys = key_index.pack_keys(chain(60))
    slots = name_slots(tables, keys)
    assert not insert(tables, slots).any()
    shuffled = np.random.default_rng(0).permutation(60)
    assert (key_index.find(tables, keys[shuffled], 0) == slots[shuffled]).all()


def test_unknown_keys_answer_minus_one_in_their_place(tables: Tables) -> None:
    keys = key_index.pack_keys(chain(4))
    insert(tables, name_slots(tables, keys[:2]))
    assert key_index.find(tables, keys[[3, 1, 2, 0]], 0).tolist() == [-1, 1, -1, 0]


def test_no_keys_find_nothing(tables: Tables) -> None:
    assert key_index.find(tables, key_index.pack_keys([]), 0).shape == (0,)
    assert insert(tables, np.empty(0, dtype=np.int64)).shape == (0,)


def test_parts_of_one_key_are_different_entries(tables: Tables) -> None:
    keys = key_index.pack_keys(chain(1) * 3)
    insert(tables, name_slots(tables, keys, [0, 1, 2]))
    assert [int(key_index.find(tables, keys[:1], part)[0]) for part in range(4)] == [0, 1, 2, -1]


def test_keys_of_one_batch_share_a_bucket(tables: Tables) -> None:
    keys = same_bucket(BUCKET_WAYS)
    slots = name_slots(tables, keys)
    assert not insert(tables, slots).any()
    assert (key_index.find(tables, keys, 0) == slots).all()


def test_full_bucket_refuses_the_last_of_a_batch(tables: Tables) -> None:
    keys = same_bucket(BUCKET_WAYS + 3)
    full = insert(tables, name_slots(tables, keys))
    assert full.tolist() == [False] * BUCKET_WAYS + [True] * 3
    assert key_index.find(tables, keys, 0).tolist() == [*range(BUCKET_WAYS), -1, -1, -1]


def test_batch_fills_the_gaps_that_removals_left(tables: Tables) -> None:
    keys = same_bucket(BUCKET_WAYS + 3)
    slots = name_slots(tables, keys)
    insert(tables, slots[:BUCKET_WAYS])
    key_index.remove(tables, slots[[2, 5, 11]])
    assert not insert(tables, slots[BUCKET_WAYS:]).any()
    expected = slots.copy()
    expected[[2, 5, 11]] = -1
    assert (key_index.find(tables, keys, 0) == expected).all()


def test_removal_passes_over_what_is_not_there(tables: Tables) -> None:
    keys = key_index.pack_keys(chain(3))
    slots = name_slots(tables, keys)
    insert(tables, slots[:2])
    key_index.remove(tables, slots[1:])
    key_index.remove(tables, slots[1:])
    assert key_index.find(tables, keys, 0).tolist() == [0, -1, -1]


def test_equal_tags_are_told_apart_by_the_whole_key(tables: Tables) -> None:
    keys = np.array([[77, 5, 1, 1], [77, 5, 1, 2], [77, 5 + 2**32, 1, 1]], dtype="<u8")
    slots = name_slots(tables, keys)
    insert(tables, slots[:1])
    assert key_index.find(tables, keys, 0).tolist() == [0, -1, -1]
    insert(tables, slots[1:])
    assert key_index.find(tables, keys, 0).tolist() == [0, 1, 2]


def test_tag_zero_is_not_taken_for_an_empty_way(tables: Tables) -> None:
    keys = np.array([[77, 0, 1, 1]], dtype="<u8")
    assert key_index.find(tables, keys, 0).tolist() == [-1]
    insert(tables, name_slots(tables, keys))
    assert key_index.find(tables, keys, 0).tolist() == [0]


def ready_chain(tables: Tables, slots: list[int], part: int = 0) -> Array:
    """Enter a chain whose blocks lie, READY, in `slots`."""
    keys, at = key_index.pack_keys(chain(len(slots))), np.array(slots)
    tables.slot_key[at], tables.slot_part[at], tables.slot_state[at] = keys, part, READY
    assert not insert(tables, at).any()
    return keys


@pytest.mark.parametrize("slots", [[3, 4, 5, 6], [3, 4, 9, 10], [9, 3, 4, 5], [62, 63, 0, 1]])
def test_run_is_found_in_a_row_or_not(tables: Tables, slots: list[int]) -> None:
    keys = ready_chain(tables, slots)
    assert key_index.find_run(tables, keys, [0]).tolist() == [slots]
    more = key_index.pack_keys(chain(6))
    assert key_index.find_run(tables, more, [0]).tolist() == [slots]
    assert key_index.find_run(tables, keys, [1]).tolist() == [[]]
    assert key_index.find_run(tables, keys[:0], [0]).tolist() == [[]]


def test_run_does_not_end_where_a_block_has_left_its_key_behind(tables: Tables) -> None:
    keys = ready_chain(tables, [0, 1, 2, 3])
    key_index.remove(tables, np.array([2, 3]))
    tables.slot_state[[2, 3]] = FREE
    at = np.array([7, 8])
    tables.slot_key[at], tables.slot_state[at] = keys[2:], READY
    insert(tables, at)
    assert key_index.find_run(tables, keys, [0]).tolist() == [[0, 1, 7, 8]]


def test_run_of_several_parts_ends_with_the_shortest(tables: Tables) -> None:
    keys = ready_chain(tables, [0, 1, 2, 3])
    ready_chain(tables, [10, 11, 12], part=1)
    assert key_index.find_run(tables, keys, [0, 1]).tolist() == [[0, 1, 2], [10, 11, 12]]
    assert key_index.find_run(tables, keys[:3], [1, 0]).tolist() == [[10, 11, 12], [0, 1, 2]]
    assert key_index.find_run(tables, keys[:3], [0, 2]).tolist() == [[], []]


def test_run_ends_where_a_part_is_not_ready(tables: Tables) -> None:
    keys = ready_chain(tables, [0, 1, 2, 3])
    ready_chain(tables, [10, 11, 13, 14], part=1)
    tables.slot_state[[3, 13]] = RESERVED
    assert key_index.find_run(tables, keys, [0]).tolist() == [[0, 1, 2]]
    assert key_index.find_run(tables, keys, [0, 1]).tolist() == [[0, 1], [10, 11]]


@pytest.mark.parametrize("keys", [[b"short"], [b"x" * 16] * 2 + [b"y" * 33]])
def test_what_is_no_key_is_refused(keys: list[BlockKey]) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        key_index.pack_keys(keys)


def test_row_of_large_blocks_goes_on_in_the_next_slab(tables: Tables) -> None:
    blocks = chain(6)
    put(tables, blocks, block_bytes=3 * SLOT)
    row = key_index._find_row(tables, key_index.pack_keys(blocks), 0)
    assert row is not None
    assert row[0].tolist() == find(tables, blocks)
    assert len(set(tables.geometry.slab_of(row[0]))) == 3


def test_row_of_small_blocks_goes_on_in_the_next_run_of_the_slab() -> None:
    tables, blocks = make_tables(num_slabs=3, slots_per_slab=3 * RUN_SLOTS), chain(7 * RUN_SLOTS)
    put(tables, blocks)
    for start in (0, RUN_SLOTS - 1, RUN_SLOTS):
        for count in (1, 2, RUN_SLOTS, RUN_SLOTS + 1, 6 * RUN_SLOTS):
            part = blocks[start : start + count]
            row = key_index._find_row(tables, key_index.pack_keys(part), 0)
            assert row is not None
            assert row[0].tolist() == find(tables, part)


def test_of_many_slots_with_equal_keys_and_parts_the_first_ones_stay() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(0, 2, (400, 4)).astype("<u8")
    parts = random.integers(0, 2, 400).astype("<u4")
    used = random.permutation(400)
    seen: set[tuple[int, ...]] = set()
    expected = []
    for slot in used.tolist():
        name = (*keys[slot].tolist(), int(parts[slot]))
        expected.append(name in seen)
        seen.add(name)
    assert key_index.repeated(keys[used], parts[used]).tolist() == expected


def test_other_threads_go_on_while_millions_of_slots_are_compared() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, (1_000_000, 4), dtype="<u8")
    parts = np.zeros(len(keys), dtype="<u4")
    work = threading.Thread(target=key_index.repeated, args=(keys, parts))
    work.start()
    num_turns = 0
    while work.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 30
