"""Blocks that are of no use any more go first, and are as good as others until they go."""

import numpy as np

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.eviction import choose_victims
from tests.unit.store.small_arena import NOBODY, chain, fetch, store


def victims(arena: Arena, count: int) -> list[int]:
    within = np.arange(arena.tables.geometry.num_slots)
    return list(choose_victims(arena.tables, count, within=within, protect=NOBODY).tolist())


def give_up(arena: Arena, keys: list[BlockKey], *parts: int) -> int:
    return ArenaOwner(arena).give_up(b"".join(keys), parts)


def test_what_is_given_up_goes_before_what_is_older(arena: Arena) -> None:
    store(arena, chain(3, seed="old"))
    useless = store(arena, chain(2, seed="useless"))
    assert give_up(arena, chain(2, seed="useless"), 0) == 2
    assert victims(arena, 2) == useless.slots[::-1].tolist()


def test_only_the_parts_that_are_named_are_given_up(arena: Arena) -> None:
    keys = chain(1)
    store(arena, keys, part=0)
    other = store(arena, keys, part=1)
    assert give_up(arena, keys, 1, 2) == 1
    assert victims(arena, 1) == other.slots.tolist()


def test_what_is_leased_or_not_here_is_left_alone(arena: Arena) -> None:
    store(arena, chain(2))
    held = arena.lease(chain(2))
    assert held
    assert give_up(arena, chain(2) + chain(3, seed="elsewhere"), 0) == 0
    assert give_up(arena, [], 0) == 0
    assert give_up(arena, chain(2)) == 0


def test_a_parent_stays_as_long_as_its_child_is_used(arena: Arena) -> None:
    keys = chain(2)
    old = store(arena, chain(1, seed="old"))
    store(arena, keys)
    assert give_up(arena, keys[:1], 0) == 1
    assert victims(arena, 1) == old.slots.tolist()


def test_what_is_used_again_is_as_good_as_any_other(arena: Arena) -> None:
    keys = chain(2)
    store(arena, keys)
    other = store(arena, chain(2, seed="other"))
    assert give_up(arena, keys, 0) == 2
    held = arena.lease(keys)
    assert held is not None
    assert fetch(arena, keys, held[0])
    arena.release(*held)
    assert set(victims(arena, 2)) == set(other.slots.tolist())
