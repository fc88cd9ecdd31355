import hashlib
import struct

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.index import key_table
from kvray.index.key_table import Array, KeyTable
from tests.examples import examples

SPREAD = [hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(200)]
CROWDED = [struct.pack("<QQQQ", 7 << 32 | 1, n, n, n) for n in range(60)]
"""All of one bucket, however often it is split."""
ALIKE = [struct.pack("<QQQQ", 5, 5, n, 0) for n in range(4)]
"""All of one bucket and tag."""
KEYS = SPREAD + CROWDED + ALIKE


def pack(keys: list[bytes]) -> Array:
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4)


def values_of(table: KeyTable, keys: list[bytes]) -> list[int]:
    packed = pack(keys)
    values: list[int] = table.values(packed, table.find(packed)).tolist()
    return values


def put(table: KeyTable, keys: list[bytes], values: list[int]) -> None:
    packed = pack(keys)
    table.put(packed, table.find(packed), np.array(values, dtype=np.uint32))


def with_value(table: KeyTable, value: int, step: int) -> set[bytes]:
    chosen: Array = np.arange(4) == value
    found: list[bytes] = []
    for start in range(0, table.num_slots, step):
        stop = min(start + step, table.num_slots)
        found += [key.tobytes() for key in table.keys_with(chosen.take, start, stop)]
    assert len(set(found)) == len(found)
    return {key for key in found if values_of(table, [key]) == [value]}


class TableAgainstDict(RuleBasedStateMachine):
    """A table that begins with two buckets, and splits one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(key_table, "_BUCKETS_MIN", 2)
        self.patch.setattr(key_table, "_SPLIT", 1)
        self.table = KeyTable()
        self.model: dict[bytes, int] = {}

    def teardown(self) -> None:
        self.patch.undo()

    @rule(
        first=st.integers(0, len(KEYS) - 1),
        count=st.integers(0, 120),
        value=st.integers(0, 3),
    )
    def put(self, first: int, count: int, value: int) -> None:
        keys = KEYS[first : first + count]
        put(self.table, keys, [value] * len(keys))
        for key in keys:
            self.model[key] = value
        self.model = {key: value for key, value in self.model.items() if value}

    @rule(value=st.integers(1, 3), step=st.sampled_from([7, 64, 10_000]))
    def select(self, value: int, step: int) -> None:
        expected = {key for key, its in self.model.items() if its == value}
        assert with_value(self.table, value, step) == expected

    @invariant()
    def finds_what_was_put(self) -> None:
        assert len(self.table) == len(self.model)
        assert values_of(self.table, KEYS) == [self.model.get(key, 0) for key in KEYS]


TableAgainstDict.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestTableAgainstDict = TableAgainstDict.TestCase


def test_many_keys_are_found_again_after_the_table_has_grown() -> None:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**63, (60_000, 4)).astype("<u8")
    table = KeyTable()
    for start in range(0, len(keys), 7_000):
        some = keys[start : start + 7_000]
        table.put(some, table.find(some), np.arange(start + 1, start + 1 + len(some), dtype="u4"))
    assert len(table) == len(keys)
    assert table.values(keys, table.find(keys)).tolist() == list(range(1, len(keys) + 1))
    assert table.num_slots < 4 * len(keys)
