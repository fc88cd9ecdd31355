import functools
import hashlib
import operator
import struct
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.errors import ConfigError
from kvray.index import PARTS_MAX, Index, Loss, Run, holder_rows, key_table
from kvray.index import index as index_module
from kvray.index.key_table import Array, KeyTable
from tests.examples import examples

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(6)]
SHARDS = ["a", "b", "c"]
NUM_PARTS = 3
EVERYTHING = 2**20

Entry = tuple[bytes, int]
"""A key and a part."""
entries = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, NUM_PARTS - 1)), max_size=8)
shards = st.sampled_from(SHARDS)


def packed(named: list[Entry]) -> tuple[bytes, list[int]]:
    return b"".join(key for key, _ in named), [part for _, part in named]


def index_of(**held: list[Entry]) -> Index:
    """Return an index with these entries of shards."""
    index = Index()
    for shard, named in held.items():
        index.add(shard, *packed(named))
    return index


def is_purged(index: Index) -> bool:
    """Return whether no entries are left of shards that were dropped or started over."""
    return not any(one.codes for one in index._ended)


class IndexAgainstSet(RuleBasedStateMachine):
    """The model is a set of (shard, key, part), and the shards that are silent.

    Rows have room for 2 or 3 holders, so that a key moves between all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(holder_rows, "_WIDTHS", (1, 2, 3))
        self.index = Index()
        self.model: set[tuple[str, bytes, int]] = set()
        self.silent: set[str] = set()

    def teardown(self) -> None:
        self.patch.undo()

    @rule(shard=shards, named=entries)
    def add(self, shard: str, named: list[Entry]) -> None:
        self.index.add(shard, *packed(named))
        self.model |= {(shard, *entry) for entry in named}

    @rule(shard=shards, named=entries)
    def remove(self, shard: str, named: list[Entry]) -> None:
        left = self.model - {(shard, *entry) for entry in named}
        self.check(self.index.remove(shard, *packed(named)), left)
        self.model = left

    @rule(shard=shards)
    def drop(self, shard: str) -> None:
        self.index.drop(shard)
        self.forget(shard)

    @rule(shard=shards, settles=st.booleans())
    def restart(self, shard: str, settles: bool) -> None:
        self.index.restart(shard)
        if settles:
            self.index.settle(shard)
        self.forget(shard)

    def forget(self, shard: str) -> None:
        self.model = {entry for entry in self.model if entry[0] != shard}
        self.silent.discard(shard)

    @rule(shard=shards)
    def silence(self, shard: str) -> None:
        self.index.add(shard, b"", [])
        self.index.set_silent(shard, True)
        self.silent.add(shard)

    @rule(shard=shards)
    def hear(self, shard: str) -> None:
        self.index.set_silent(shard, False)
        self.silent.discard(shard)

    @rule(slots=st.sampled_from([4096, EVERYTHING]))
    def purge(self, slots: int) -> None:
        self.check(self.index.purge(slots), self.model)

    def check(self, losses: list[Loss], left: set[tuple[str, bytes, int]]) -> None:
        """Nobody is told of a loss whose parts somebody has."""
        for loss in losses:
            for at in range(0, len(loss.keys), 32):
                key = loss.keys[at : at + 32]
                assert key in KEYS
                assert loss.parts
                held = {part for _, other, part in left if other == key}
                assert not any(loss.parts >> part & 1 for part in held)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), num_parts=st.integers(1, NUM_PARTS))
    def match(self, keys: list[bytes], num_parts: int) -> None:
        whole = (1 << num_parts) - 1
        found = self.index.match(b"".join(keys), num_parts)
        held = [self.holders(key) for key in keys]
        together = [sum_of(holders) & whole == whole for holders in held] + [False]
        alone = {
            shard: [holders.get(shard, 0) & whole == whole for holders in held] + [False]
            for shard in SHARDS
        }
        runs = {shard: min(has.index(False), len(keys)) for shard, has in alone.items()}
        assert found.num_blocks == together.index(False)
        assert found.holders == {shard: run for shard, run in runs.items() if run}

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def locate(self, keys: list[bytes]) -> None:
        runs, held = self.index.locate(b"".join(keys)), [self.holders(key) for key in keys]
        while held and not held[-1]:
            held.pop()
        starts = [0, *(run.stop for run in runs)]
        found = [[run.holders] * (run.stop - at) for at, run in zip(starts, runs, strict=False)]
        assert all(found)
        assert [holders for run in found for holders in run] == held
        assert all(one[0] != other[0] for one, other in pairwise(found))

    @rule(parts=st.integers(1, 2**NUM_PARTS - 1))
    def ask_what_is_still_lost(self, parts: int) -> None:
        self.index.purge(EVERYTHING)
        for shard in SHARDS:
            self.index.settle(shard)
        self.index.purge(EVERYTHING)
        lost = [key for key in KEYS if parts & ~sum_of(self.holders(key, heard_only=False))]
        assert self.index.still_lost(b"".join(KEYS), parts) == b"".join(lost)

    def holders(self, key: bytes, *, heard_only: bool = True) -> dict[str, int]:
        holders: dict[str, int] = {}
        for shard, other, part in self.model:
            if other == key and not (heard_only and shard in self.silent):
                holders[shard] = holders.get(shard, 0) | 1 << part
        return holders

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        assert len(self.index) == len({key for _, key, _ in self.model})
        counted = {shard: count for shard, count in self.index.entries().items() if count}
        assert counted == Counter(shard for shard, _, _ in self.model)


def sum_of(holders: dict[str, int]) -> int:
    return functools.reduce(operator.or_, holders.values(), 0)


TestIndexAgainstSet = IndexAgainstSet.TestCase


@pytest.fixture
def halves() -> Index:
    """An index where `a` has part 0 of two blocks and `b` has part 1."""
    return index_of(**{one: [(KEYS[0], at), (KEYS[1], at)] for at, one in enumerate("ab")})


def test_a_shard_loses_nothing_while_it_keeps_another_part(halves):
    halves.add("a", KEYS[1], [2])
    assert halves.remove("a", KEYS[1], [2]) == []
    assert halves.remove("a", KEYS[1], [0]) == [Loss(keys=KEYS[1], parts=1, shards=("b",))]


def test_a_shard_that_starts_over_loses_only_what_it_does_not_say_again(halves):
    halves.restart("a")
    assert halves.purge(EVERYTHING) == []
    halves.add("a", KEYS[0], [0])
    assert halves.remove("a", KEYS[1], [0]) == [], "it may say it yet"
    halves.settle("a")
    assert halves.purge(EVERYTHING) == [Loss(keys=KEYS[1], parts=1, shards=("b",))]


@pytest.mark.parametrize("parts", [[], [0, 1], [-1], [PARTS_MAX], [2**32 - 1], [2**70]])
def test_entries_that_cannot_be_are_refused_and_change_nothing(halves, parts):
    for shard in "ac":
        with pytest.raises(ConfigError):
            halves.add(shard, KEYS[0], parts)
    assert (len(halves), halves.entries()) == (2, {"a": 2, "b": 2})


@pytest.mark.parametrize(
    ("num_bytes", "num_parts", "said"),
    [
        *((32, num_parts, "num_parts") for num_parts in (0, -1, PARTS_MAX + 1)),
        *((num_bytes, 1, "no whole number of keys") for num_bytes in (1, 31, 33, 127)),
    ],
)
def test_questions_that_cannot_be_are_refused(num_bytes, num_parts, said):
    with pytest.raises(ConfigError, match=said):
        Index().match(bytes(num_bytes), num_parts)
    if num_bytes % 32:
        with pytest.raises(ConfigError, match=said):
            Index().locate(bytes(num_bytes))


def test_a_purge_goes_on_where_it_stopped_in_smaller_slices_where_blocks_have_many_holders():
    def num_purges(slots: int) -> int:
        count = 0
        while not is_purged(index):
            index.purge(slots)
            count += 1
        return count

    index = index_of(a=[(key, 0) for key in KEYS])
    index.drop("a")
    assert 1 < num_purges(1000) <= 17
    index, keys = Index(), np.random.default_rng(0).integers(1, 2**63, (8192, 4), dtype="<u8")
    for shard in range(13):
        held = keys[(np.arange(8192) >> shard) & 1 == 1] if shard < 12 else keys
        index.add(f"s{shard}", held.tobytes(), [0] * len(held))
    index.drop("s12")
    assert num_purges(100_000) > 1
    assert sum(index.entries().values()) == 12 * 4096


def test_blocks_with_holders_of_their_own_need_no_objects_of_their_own():
    index, random = Index(), np.random.default_rng(0)
    keys = random.integers(1, 2**63, (2000, 4), dtype="<u8")
    is_held = random.random((2000, 40)) < 0.5
    for shard in range(40):
        held = keys[is_held[:, shard]]
        index.add(f"s{shard}", held.tobytes(), [0] * len(held))
    assert len({one.tobytes() for one in is_held}) == 2000
    assert len(index._codes._masks) == 1 + 40, "one code a shard, whoever holds the blocks"
    starts = [run.holders for run in index.locate(keys.tobytes())]
    assert starts == [{f"s{one}": 1 for one in np.flatnonzero(held)} for held in is_held]
    found = index.match(keys.tobytes(), 1)
    assert found.num_blocks == 2000
    assert found.holders == {f"s{one}": n for one, n in enumerate(is_held.argmin(axis=0)) if n}


def test_a_holder_too_many_is_not_entered_until_another_leaves():
    index = Index()
    many = [f"s{number}" for number in range(holder_rows.HOLDERS_MAX)]
    for shard in [*many, "late"]:
        index.add(shard, KEYS[0], [0])
    assert index.locate(KEYS[0]) == [Run(stop=1, holders=dict.fromkeys(many, 1))]
    assert index.remove("late", KEYS[0], [0]) == []
    assert index.entries()["late"] == 0
    assert len(index.locate(KEYS[0])[0].holders) == len(many)
    index.remove("s0", KEYS[0], [0])
    index.add("late", KEYS[0], [0])
    assert set(index.locate(KEYS[0])[0].holders) == {*many[1:], "late"}


changes = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "drop", "restart", "purge"]), shards, entries),
    max_size=20,
)


@settings(max_examples=examples(90))
@given(changes)
def test_of_too_many_holders_all_known_are_right(changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_rows, "_WIDTHS", (1, 2))
        patch.setattr(index_module, "HOLDERS_MAX", 2)
        index, model = Index(), set[tuple[str, bytes, int]]()
        for act, shard, named in changes:
            entered = {(shard, *entry) for entry in named}
            if act == "add":
                index.add(shard, *packed(named))
                model |= entered
            elif act == "remove":
                index.remove(shard, *packed(named))
                model -= entered
            elif act == "purge":
                index.purge(EVERYTHING)
            else:
                getattr(index, act)(shard)
                model = {entry for entry in model if entry[0] != shard}
            known = {
                (shard, key, part)
                for key in KEYS
                for run in index.locate(key)
                for shard, mask in run.holders.items()
                for part in range(NUM_PARTS)
                if mask >> part & 1
            }
            assert known <= model
            counted = {shard: sum(one[0] == shard for one in known) for shard in index.entries()}
            assert counted == index.entries()
            assert len(index) == len({key for _, key, _ in known})
        for shard in SHARDS:
            index.drop(shard)
        index.purge(EVERYTHING)
        assert is_purged(index)


SPREAD = [hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(200)]
CROWDED = [struct.pack("<QQQQ", 7 << 32 | 1, n, n, n) for n in range(60)]
"""All of one bucket, however often it is split."""
ALIKE = [struct.pack("<QQQQ", 5, 5, n, 0) for n in range(4)]
"""All of one bucket and tag."""
KEY_TABLE_KEYS = SPREAD + CROWDED + ALIKE


def words_of(keys: list[bytes]) -> Array:
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4)


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

    def values(self, keys: list[bytes]) -> list[int]:
        words = words_of(keys)
        return list(self.table.values(words, self.table.find(words)).tolist())

    @rule(
        first=st.integers(0, len(KEY_TABLE_KEYS) - 1),
        count=st.integers(0, 120),
        value=st.integers(0, 3),
    )
    def put(self, first: int, count: int, value: int) -> None:
        keys = KEY_TABLE_KEYS[first : first + count]
        words = words_of(keys)
        self.table.put(words, self.table.find(words), np.full(len(keys), value, np.uint32))
        self.model |= dict.fromkeys(keys, value)
        self.model = {key: value for key, value in self.model.items() if value}

    @rule(value=st.integers(1, 3), step=st.sampled_from([7, 64, 10_000]))
    def select(self, value: int, step: int) -> None:
        chosen: Array = np.arange(4) == value
        found: list[bytes] = []
        for start in range(0, self.table.num_slots, step):
            stop = min(start + step, self.table.num_slots)
            found += [key.tobytes() for key in self.table.keys_with(chosen.take, start, stop)]
        assert len(set(found)) == len(found)
        expected = {key for key, its in self.model.items() if its == value}
        assert {key for key in found if self.values([key]) == [value]} == expected

    @invariant()
    def finds_what_was_put(self) -> None:
        assert len(self.table) == len(self.model)
        assert self.values(KEY_TABLE_KEYS) == [self.model.get(key, 0) for key in KEY_TABLE_KEYS]


TableAgainstDict.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestTableAgainstDict = TableAgainstDict.TestCase


def test_many_keys_are_found_again_after_the_table_has_grown():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**63, (60_000, 4)).astype("<u8")
    table = KeyTable()
    for start in range(0, len(keys), 7_000):
        some = keys[start : start + 7_000]
        table.put(some, table.find(some), np.arange(start + 1, start + 1 + len(some), dtype="u4"))
    assert len(table) == len(keys)
    assert table.values(keys, table.find(keys)).tolist() == list(range(1, len(keys) + 1))
    assert table.num_slots < 4 * len(keys)
