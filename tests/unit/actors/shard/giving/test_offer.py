"""What several nodes offer one that joins, and from whom it takes each block."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.shard.giving.choice import hottest_first
from kvray.actors.shard.giving.offer import merged, offered, spans_of, within_quotas
from kvray.identity.block import split_keys
from kvray.store.arena.quotas import name_of, set_quotas
from kvray.store.arena.tables import Array
from tests.unit.actors.shard.giving.test_choice import TREES, rank_of, tree
from tests.unit.store.small_arena import SLOT, chain, make_tables, put

Seeds = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def offers_of(sizes: list[tuple[int, int]], seeds: list[int]) -> list[Array]:
    """Return what nodes offer that have some of a tree, each in an order of its own."""
    tables = tree(sizes)
    found = []
    for seed in seeds:
        ranks = rank_of(tables, seed)
        slots = hottest_first(tables, lambda slots, ranks=ranks: ranks[slots])
        # Some have only the hottest, and some of it on disk.
        here = slots[: 1 + seed * len(slots) // 9]
        rows = offered(tables, here, on_disk=False)
        rows["on_disk"] = np.arange(len(rows)) > seed
        found.append(rows)
    return found


def names(rows: Array) -> list[Any]:
    return list(zip(split_keys(rows["key"].tobytes()), rows["part"].tolist(), strict=True))


@given(TREES, Seeds)
def test_each_block_comes_once_from_one_who_has_it_and_parents_first(sizes, seeds):
    offers = offers_of(sizes, seeds)

    rows, sources = merged(offers)

    assert len(set(names(rows))) == len(rows)
    assert set(names(rows)) == {name for one in offers for name in names(one)}
    for row, source in zip(rows, sources.tolist(), strict=True):
        assert row in offers[source]
    places = {name: at for at, name in enumerate(names(rows))}
    for at, parent in enumerate(names_of_parents(rows)):
        in_memory = not rows["on_disk"][at] and parent in places
        assert not in_memory or rows["on_disk"][places[parent]] or places[parent] < at


def names_of_parents(rows: Array) -> list[Any]:
    return list(zip(split_keys(rows["parent"].tobytes()), rows["part"].tolist(), strict=True))


@given(TREES, Seeds)
def test_what_one_has_in_memory_comes_before_what_is_on_disks_only(sizes, seeds):
    rows, _ = merged(offers_of(sizes, seeds))
    assert rows["on_disk"].tolist() == sorted(rows["on_disk"].tolist())


@given(TREES, Seeds)
def test_spans_have_all_blocks_of_their_node_in_order(sizes, seeds):
    rows, sources = merged(offers_of(sizes, seeds))
    shards = [f"kvray-shard-{source}" for source in sources.tolist()]

    spans = spans_of(rows, shards)

    found = {}
    for places, span in spans:
        for at, key in zip(places, split_keys(span.keys), strict=True):
            assert span.source == shards[at].replace("shard", "mover")
            found[at] = key
        assert span.parent in (b"", rows["parent"][places[0]].tobytes())
        assert bool(span.parent) == bool(rows["depth"][places[0]])
    assert [found[at] for at in range(len(rows))] == split_keys(rows["key"].tobytes())


def test_nodes_that_have_the_same_give_like_shares_of_whole_chains():
    tables = make_tables(num_slabs=64)
    for at in range(400):
        head = np.random.default_rng(at).bytes(32)
        put(tables, [head], depth=0)  # type: ignore[list-item]
        tables.slot_head[at] = int.from_bytes(head[-3:], "little") or 1
    offer = offered(tables, np.arange(400), on_disk=False)
    _, sources = merged([offer] * 4)
    assert np.bincount(sources).min() > 60
    again = np.concatenate([offer, offer])
    again["part"][400:] = 1
    rows, sources = merged([again] * 4)
    of = dict(zip(names(rows), sources.tolist(), strict=True))
    assert all(of[key, 0] == of[key, 1] for key, _ in names(offer)), "a chain has one source"


def test_a_namespace_gets_no_more_than_its_quota_has_left():
    tables, here = make_tables(), make_tables()
    for number in (1, 2):
        put(tables, chain(6, seed=str(number)), namespace=number)
    put(here, chain(2, seed="own"), namespace=1)
    set_quotas(here, {name_of(1): 5 * SLOT})
    rows = offered(
        tables, np.arange(tables.geometry.num_slots)[tables.slot_tick > 0], on_disk=False
    )

    fits = within_quotas(rows, here)

    assert rows["namespace"][fits].tolist().count(1) == 3
    assert fits[rows["namespace"] == 2].all()
    assert fits[rows["namespace"] == 1].tolist() == [True] * 3 + [False] * 3
