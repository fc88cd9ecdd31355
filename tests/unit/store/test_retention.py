"""What decides which blocks of a node stay follows what happens in its arena."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.store.policy import POLICIES
from kvray.store.retention import Retention
from tests.unit.store.small_arena import PATIENT_S, chain, make_arena, store


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = make_arena(tmp_path)
    made.join("shard")
    yield made
    made.close()


def slots_of(arena: Arena, keys: list[BlockKey]) -> Array:
    return key_index.find(arena.tables, key_index.pack_keys(keys), 0)


def use(arena: Arena, keys: list[BlockKey]) -> None:
    (held,) = arena.lease(keys) or [None]
    assert held is not None
    arena.release(held, wait_s=PATIENT_S)


def test_blocks_rank_by_their_last_use_and_what_was_given_up_goes_first(arena: Arena) -> None:
    retention = Retention(arena, "lru", "all")
    old, new = chain(4, seed="old"), chain(4, seed="new")
    store(arena, old)
    store(arena, new)
    retention.observe()
    assert (retention.rank(slots_of(arena, old)) < retention.rank(slots_of(arena, new))).all()
    use(arena, old)
    retention.observe()
    assert (retention.rank(slots_of(arena, old)) > retention.rank(slots_of(arena, new))).all()
    ArenaOwner(arena).give_up(b"".join(old[3:]), [0])
    assert retention.rank(slots_of(arena, old)).argmin() == 3
    assert retention.rank(slots_of(arena, old))[3] == -np.inf


@pytest.mark.parametrize("policy", POLICIES)
def test_what_came_since_the_last_look_goes_last(arena: Arena, policy: str) -> None:
    retention, owner = Retention(arena, policy, "all"), ArenaOwner(arena)
    for number in range(8):
        store(arena, chain(7, seed=str(number)))
        retention.observe()
    owner.evict_ahead(0.5, retention.rank)
    new, left = chain(7, seed="new"), arena.stats()["blocks"]
    store(arena, new)
    owner.evict_ahead(0.8, retention.rank)
    assert arena.stats()["blocks"] < left, "others went"
    (here,) = arena.present(new, [0])
    assert here.all()


def test_what_was_found_once_is_worth_its_write(arena: Arena) -> None:
    retention = Retention(arena, "lru", "twice")
    once, twice = chain(4, seed="once"), chain(4, seed="twice")
    store(arena, once)
    store(arena, twice)
    retention.observe()
    use(arena, twice)
    retention.observe()
    assert retention.admits(slots_of(arena, twice)).all()
    assert not retention.admits(slots_of(arena, once)).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_arena_is_kept_with_room_by_every_policy(
    arena: Arena, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a search may take so long that a pause follows.
    monkeypatch.setattr("kvray.store.arena.owner._LONG_LOOK_S", math.inf)
    retention, owner = Retention(arena, policy, "likely"), ArenaOwner(arena)
    for number in range(30):
        store(arena, chain(7, seed=str(number)))
        use(arena, chain(7, seed=str(number)))
        retention.observe()
        owner.evict_ahead(0.25, retention.rank)
        num_blocks = arena.stats()["blocks"]
        assert num_blocks <= 52
    assert num_blocks >= 40, "no more goes than has to"
