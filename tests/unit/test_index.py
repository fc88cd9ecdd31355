import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.block import BlockKey
from kvray.errors import ConfigError
from kvray.index import PARTS_MAX, Index, split_keys

KEYS = [BlockKey(hashlib.sha256(bytes([n])).digest()) for n in range(6)]
SHARDS = ["a", "b", "c"]
NUM_PARTS = 2

entries = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, NUM_PARTS - 1)), max_size=8)
shards = st.sampled_from(SHARDS)


class IndexAgainstDict(RuleBasedStateMachine):
    """The model is a set of (shard, key, part)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: set[tuple[str, BlockKey, int]] = set()

    @rule(shard=shards, named=entries)
    def add(self, shard: str, named: list[tuple[BlockKey, int]]) -> None:
        self.index.add(shard, b"".join(key for key, _ in named), [part for _, part in named])
        self.model |= {(shard, key, part) for key, part in named}

    @rule(shard=shards, named=entries)
    def remove(self, shard: str, named: list[tuple[BlockKey, int]]) -> None:
        self.index.remove(shard, b"".join(key for key, _ in named), [part for _, part in named])
        self.model -= {(shard, key, part) for key, part in named}

    @rule(shard=shards)
    def drop(self, shard: str) -> None:
        self.index.drop(shard)
        self.model = {entry for entry in self.model if entry[0] != shard}

    @rule(shard=shards, named=entries)
    def refuse_keys_without_parts(self, shard: str, named: list[tuple[BlockKey, int]]) -> None:
        keys = b"".join(key for key, _ in named) + KEYS[0]
        with pytest.raises(ConfigError):
            self.index.add(shard, keys, [part for _, part in named])

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), num_parts=st.integers(1, NUM_PARTS))
    def match(self, keys: list[BlockKey], num_parts: int) -> None:
        found = self.index.match(keys, num_parts)
        whole = {
            shard: [self.has_all(shard, key, num_parts) for key in keys] + [False]
            for shard in SHARDS
        }
        runs = {shard: has.index(False) for shard, has in whole.items()}
        anywhere = [any(whole[shard][at] for shard in SHARDS) for at in range(len(keys))] + [False]
        assert found.num_blocks == anywhere.index(False)
        assert found.holders == {shard: run for shard, run in runs.items() if run}

    def has_all(self, shard: str, key: BlockKey, num_parts: int) -> bool:
        return all((shard, key, part) in self.model for part in range(num_parts))

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        assert len(self.index) == len({key for _, key, _ in self.model})
        counted = {shard: count for shard, count in self.index.entries().items() if count}
        assert counted == {
            shard: sum(entry[0] == shard for entry in self.model)
            for shard in {entry[0] for entry in self.model}
        }


TestIndexAgainstDict = IndexAgainstDict.TestCase


def test_a_run_may_pass_from_one_shard_to_the_next() -> None:
    index = Index()
    index.add("a", KEYS[0] + KEYS[1], [0, 0])
    index.add("b", KEYS[1] + KEYS[2], [0, 0])
    found = index.match(KEYS[:4], 1)
    assert (found.num_blocks, found.holders) == (3, {"a": 2})


def test_a_block_without_all_its_parts_is_no_match() -> None:
    index = Index()
    index.add("a", KEYS[0], [1])
    index.add("b", KEYS[0], [0])
    assert index.match(KEYS[:1], 2).num_blocks == 0


@pytest.mark.parametrize("parts", [[], [0, 1], [-1], [PARTS_MAX], [2**32 - 1]])
def test_entries_that_cannot_be_are_refused_and_change_nothing(parts: list[int]) -> None:
    index = Index()
    with pytest.raises(ConfigError):
        index.add("a", KEYS[0], parts)
    assert len(index) == 0
    assert index.entries() == {}


@pytest.mark.parametrize("num_parts", [0, -1, PARTS_MAX + 1])
def test_a_number_of_parts_that_no_block_has_is_refused(num_parts: int) -> None:
    with pytest.raises(ConfigError, match="num_parts"):
        Index().match(KEYS, num_parts)


@given(st.integers(0, 5), st.integers(1, 31))
def test_keys_that_are_not_whole_are_refused(whole: int, rest: int) -> None:
    with pytest.raises(ConfigError, match="no whole number of keys"):
        split_keys(bytes(32 * whole + rest))
