"""Which blocks go first when a node is to go, and how others are asked to take them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.shard.giving.choice import (
    batches,
    chains_of,
    held_by,
    hottest_first,
    shared_out,
    span_of,
)
from kvray.identity.block import split_keys
from kvray.index import Run
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.tables import Array, Tables
from tests.unit.store.small_arena import chain, make_tables, put, take

TREES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=12)


def tree(sizes: list[tuple[int, int]]) -> Tables:
    """Return tables with chains, each of them on top of a block that is there already."""
    tables = make_tables(num_slabs=8, slots_per_slab=8)
    known = [(None, 0)]
    for seed, (at, length) in enumerate(sizes):
        parent, depth = known[at % len(known)]
        keys = chain(length, seed=str(seed), head=parent)
        put(tables, keys, parent=parent, depth=depth)
        known += [(key, depth + nth + 1) for nth, key in enumerate(keys)]
    return tables


def rank_of(tables: Tables, seed: int) -> "Array":
    return np.random.default_rng(seed).permutation(tables.geometry.num_slots).astype(float)


@given(TREES, st.integers(0, 9))
def test_the_order_is_that_of_eviction_from_its_end(sizes, seed):
    tables = tree(sizes)
    ranks = rank_of(tables, seed)
    everything = np.arange(tables.geometry.num_slots)

    hottest = hottest_first(tables, lambda slots: ranks[slots])

    going = choose_victims(tables, 99, within=everything, rank=lambda slots: ranks[slots])
    assert hottest.tolist() == going[::-1].tolist()


def test_a_block_that_is_read_goes_like_any_other():
    tables = make_tables()
    keys = chain(3)
    put(tables, keys)
    take(tables, keys)
    assert len(hottest_first(tables, lambda slots: slots)) == 3


@given(TREES, st.integers(0, 9))
def test_spans_have_every_block_once_and_parents_first(sizes, seed):
    tables = tree(sizes)
    ranks = rank_of(tables, seed)
    slots = hottest_first(tables, lambda slots: ranks[slots])

    spans = [span_of(tables, chain, "mover") for chain in chains_of(tables, slots)]

    keys = [key for span in spans for key in split_keys(span.keys)]
    assert sorted(keys) == sorted(tables.slot_key[slot].tobytes() for slot in slots)
    slot_of = {tables.slot_key[slot].tobytes(): slot for slot in slots.tolist()}
    seen: set[bytes] = set()
    for span in spans:
        before = span.parent
        for nth, key in enumerate(split_keys(span.keys)):
            slot = slot_of[key]
            parent = int(tables.slot_parent[slot])
            assert before == (tables.slot_key[parent].tobytes() if parent >= 0 else b"")
            assert not before or before in seen, "a child comes before its parent"
            assert tables.slot_depth[slot] == span.depth + nth
            seen.add(key)
            before = key


@given(TREES, st.integers(1, 5))
def test_a_chain_goes_to_one_node_and_each_block_to_some(sizes, num_targets):
    tables = tree(sizes)
    slots = hottest_first(tables, lambda slots: slots)
    shares = shared_out(tables, slots, num_targets)
    assert sorted(np.concatenate(shares).tolist()) == sorted(slots.tolist())
    heads = [set(tables.slot_head[share].tolist()) for share in shares]
    assert sum(map(len, heads)) == len(set().union(*heads))


@given(TREES, st.integers(1, 60_000), st.integers(1, 9))
def test_batches_keep_within_their_bounds(sizes, bytes_max, blocks_max):
    tables = tree(sizes)
    slots = hottest_first(tables, lambda slots: slots)
    found = list(batches(tables, slots, bytes_max=bytes_max, blocks_max=blocks_max))
    assert np.concatenate(found).tolist() == slots.tolist()
    for batch in found:
        assert 1 <= len(batch) <= blocks_max
        assert len(batch) == 1 or tables.block_bytes(batch).sum() <= bytes_max


def test_a_part_counts_as_held_where_another_node_has_just_that():
    runs = [
        Run(stop=1, holders={"own": 0b11}),
        Run(stop=2, holders={"own": 0b11, "other": 0b01}),
        Run(stop=3, holders={}),
        Run(stop=5, holders={"leaving": 0b11, "other": 0b10}),
    ]
    parts = np.array([0, 0, 0, 1, 0, 1])
    held = held_by(runs, parts, frozenset({"other", "third"}))
    assert sum(held.values()).tolist() == [False, True, False, True, False, False]
