"""(key, part) -> slot: batches, buckets that are shared or full, removals."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvray.store.arena import key_index
from kvray.store.arena.layout import BUCKET_WAYS, FREE, READY, RESERVED, RUN_SLOTS
from tests.examples import examples
from tests.unit.store.small_arena import SLOT, chain, find, make_tables, put

CHAIN = key_index.pack_keys(chain(20))
CROWD = np.array([[77, n, n, n] for n in range(1, BUCKET_WAYS + 4)], dtype="<u8")
"""Of one bucket, where they have one part."""
ALIKE = np.array([[5, 5, 1, 1], [5, 5, 1, 2], [5, 5 + 2**32, 1, 1], [5, 0, 1, 1]], dtype="<u8")
"""Of one bucket, three with one tag, and one whose tag is that of an empty way."""
KEYS = np.concatenate((CHAIN, CROWD, ALIKE))
NUM_BUCKETS = 16
PARTS = (0, 1, 16)
"""The first and the last of a key are in one bucket."""
Named = list[tuple[int, int]]
"""Rows of KEYS and their parts."""
rows, some_part = st.integers(0, len(KEYS) - 1), st.sampled_from(PARTS)
blocks = st.lists(st.tuples(rows, some_part), unique=True, max_size=20)
heads = st.builds(lambda part, n: [(at, part) for at in range(n)], some_part, st.integers(1, 20))
"""Of CHAIN."""


def bucket_of(row: int, part: int) -> int:
    return (int(KEYS[row, 0]) ^ part * 0x9E3779B97F4A7C15) % NUM_BUCKETS


class IndexAgainstDict(RuleBasedStateMachine):
    """Slots enter under the keys and parts that they name, and leave; some are READY."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = make_tables()
        self.tables.slab_block_bytes[:] = SLOT  # else no slots lie in a row
        self.free = list(range(64))
        self.model: dict[tuple[int, int], int] = {}

    @rule(named=blocks | heads, is_ready=st.booleans())
    def insert(self, named: Named, is_ready: bool) -> None:
        tables = self.tables
        new = [one for one in named if one not in self.model][: len(self.free)]
        slots = np.array([self.free.pop(0) for _ in new], dtype=np.int64)
        tables.slot_key[slots] = KEYS[[row for row, _ in new]]
        tables.slot_part[slots] = [part for _, part in new]
        tables.slot_state[slots] = READY if is_ready else RESERVED
        ways = Counter(bucket_of(*one) for one in self.model)
        expected = []
        for one, slot in zip(new, slots.tolist(), strict=True):
            expected.append(ways[bucket_of(*one)] == BUCKET_WAYS)
            if expected[-1]:
                self.free.append(slot)
            else:
                self.model[one] = slot
                ways[bucket_of(*one)] += 1
        full = key_index.insert(tables, slots, tables.slot_key[slots], tables.slot_part[slots])
        assert full.tolist() == expected

    @rule(named=blocks)
    def remove(self, named: Named) -> None:
        """Remove what is there, and pass over what is not; their slots keep their keys."""
        gone = [self.model.pop(one) for one in named if one in self.model]
        key_index.remove(self.tables, np.array(gone + self.free[:2], dtype=np.int64))
        self.tables.slot_state[gone] = FREE
        self.free += gone

    @rule(first=st.integers(0, 19), count=st.integers(0, 20), parts=st.permutations(PARTS))
    def find_run(self, first: int, count: int, parts: list[int]) -> None:
        rows = range(first, min(first + count, len(CHAIN)))
        for asked in (parts[:1], parts[:2]):
            found = [[self.model.get((row, part), -1) for row in rows] for part in asked]
            run = 0
            while run < len(rows) and all(self.is_ready(one[run]) for one in found):
                run += 1
            expected = [one[:run] for one in found]
            assert key_index.find_run(self.tables, KEYS[list(rows)], asked).tolist() == expected

    def is_ready(self, slot: int) -> bool:
        return slot >= 0 and bool(self.tables.slot_state[slot] == READY)

    @rule(
        rows=st.permutations(range(len(KEYS))),
        part=st.sampled_from([*PARTS, 2]),
        count=st.integers(0, 40),
    )
    def find(self, rows: list[int], part: int, count: int) -> None:
        expected = [self.model.get((row, part), -1) for row in rows[:count]]
        assert key_index.find(self.tables, KEYS[rows[:count]], part).tolist() == expected


IndexAgainstDict.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestIndexAgainstDict = IndexAgainstDict.TestCase


@pytest.mark.parametrize("block_bytes", [SLOT, RUN_SLOTS * SLOT])
def test_a_row_goes_on_in_the_next_run_of_a_slab_and_in_the_next_slab(block_bytes):
    tables = make_tables(num_slabs=3 * block_bytes // SLOT, slots_per_slab=3 * RUN_SLOTS)
    blocks = chain(7 * RUN_SLOTS)
    put(tables, blocks, block_bytes=block_bytes)
    for start in (0, RUN_SLOTS - 1, RUN_SLOTS):
        for count in (1, 2, RUN_SLOTS, RUN_SLOTS + 1, 6 * RUN_SLOTS):
            part = blocks[start : start + count]
            row = key_index._find_row(tables, key_index.pack_keys(part), 0)
            assert row is not None
            assert row[0].tolist() == find(tables, part)


def test_of_many_slots_with_equal_keys_and_parts_the_first_ones_stay():
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


def test_other_threads_go_on_while_millions_of_slots_are_compared():
    keys = np.random.default_rng(0).integers(0, 2**63, (1_000_000, 4), dtype="<u8")
    parts = np.zeros(len(keys), dtype="<u4")
    work = threading.Thread(target=key_index.repeated, args=(keys, parts))
    work.start()
    num_turns = 0
    while work.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 30
