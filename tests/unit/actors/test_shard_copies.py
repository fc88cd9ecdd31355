"""Copies of two shards without Ray: an idle one goes first, the last one never."""

import time
from collections.abc import Iterator

import pytest

from kvray.config import CopiesConfig
from kvray.identity.block import BlockKey
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from tests.unit.actors.test_shard_staging import Tier, make_tier
from tests.unit.store.small_arena import PATIENT_S, SLOT, chain, store
from tests.waiting import wait_for

LENGTH = 6
CHAINS = [chain(LENGTH, seed=f"shared {at}") for at in range(4)]


@pytest.fixture
def tier() -> Iterator[Tier]:
    """Two shards, whose copies are idle after half a second."""
    with make_tier(copies=CopiesConfig(idle_s=0.5)) as made:
        yield made


def extra(tier: Tier, node: str) -> int:
    copies = tier.shards[node].status()["copies"]
    return int(copies["extra_bytes"]) // SLOT


def goes_first(tier: Tier, node: str, keys: list[BlockKey]) -> Array:
    retention = tier.shards[node]._serving.retention
    slots = key_index.find(tier.nodes[node].arena.tables, key_index.pack_keys(keys), 0)
    return retention.rank(slots) < -1e34


def use(tier: Tier, node: str, keys: list[BlockKey]) -> None:
    arena = tier.nodes[node].arena
    (held,) = arena.lease(keys) or [None]
    arena.release(held, wait_s=PATIENT_S)


def test_of_each_shared_chain_one_node_has_the_extra_copy_and_lets_it_go_first(tier):
    for keys in CHAINS:
        for node in "ab":
            store(tier.nodes[node].arena, keys)
    store(tier.nodes["a"].arena, own := chain(LENGTH, seed="own"))
    num_all = len(CHAINS) * LENGTH

    wait_for(lambda: extra(tier, "a") + extra(tier, "b") == num_all)

    def chosen() -> list[tuple[bool, bool]]:
        return [
            (goes_first(tier, "a", keys[1:]).all(), goes_first(tier, "b", keys[1:]).all())
            for keys in CHAINS
        ]

    wait_for(lambda: all(a != b for a, b in chosen()))
    assert not goes_first(tier, "a", own).any()


@pytest.mark.long
def test_the_last_holder_of_a_block_does_not_let_it_go(tier):
    for keys in CHAINS:
        for node in "ab":
            store(tier.nodes[node].arena, keys)
    wait_for(lambda: extra(tier, "a") + extra(tier, "b") == len(CHAINS) * LENGTH)
    loser = "a" if extra(tier, "b") else "b"
    other = "b" if loser == "a" else "a"

    tier.shards[loser].clear(10.0)

    def nothing_is_extra() -> bool:
        use(tier, other, CHAINS[0])
        return extra(tier, other) == 0

    wait_for(nothing_is_extra)
    assert not any(goes_first(tier, other, keys).any() for keys in CHAINS)


@pytest.mark.long
def test_a_tier_that_rests_looks_up_nothing(tier):
    store(tier.nodes["a"].arena, CHAINS[0])
    time.sleep(35.0)
    before = tier.nodes.calls.count(("kvray-lookup", "locate"))
    time.sleep(20.0)
    assert tier.nodes.calls.count(("kvray-lookup", "locate")) == before
