"""Which prefixes people are shown as used most."""

import numpy as np

from kvray.store.arena import key_index
from kvray.store.arena.arena import Arena
from kvray.store.retention import UseCounts, hot_prefixes
from tests.unit.store.small_arena import chain, store


def slots_of(arena: Arena, keys: list) -> np.ndarray:
    return key_index.find(arena.tables, key_index.pack_keys(keys), 0)


def test_a_common_beginning_and_what_goes_on_more_often_than_others_are_told(
    arena: Arena,
) -> None:
    tables, uses = arena.tables, UseCounts(arena.tables.geometry.num_slots)
    keys = chain(6)
    store(arena, keys)
    for now, used in ((1.0, 2), (2.0, 2), (3.0, 5)):
        uses.note(slots_of(arena, keys[:used]), now=now)
    found = hot_prefixes(tables, uses, namespace=0, most=10, now=10.0)
    assert found == [
        {"key": keys[1].hex()[:8], "num_blocks": 2, "uses": 3, "used_s_ago": 7.0},
        {"key": keys[4].hex()[:8], "num_blocks": 5, "uses": 1, "used_s_ago": 7.0},
        {"key": keys[5].hex()[:8], "num_blocks": 6, "uses": 0, "used_s_ago": None},
    ]
    assert hot_prefixes(tables, uses, namespace=0, most=1, now=10.0) == found[:1]
    assert hot_prefixes(tables, uses, namespace=7, most=10, now=10.0) == []


def test_what_is_known_of_a_slot_ends_with_the_block_in_it(arena: Arena) -> None:
    uses = UseCounts(arena.tables.geometry.num_slots)
    store(arena, chain(2))
    slots = slots_of(arena, chain(2))
    uses.note(slots, now=1.0)
    uses.forget(slots[:1], now=0.0)
    counts, used_at = uses.of(slots)
    assert (counts.tolist(), used_at.tolist()) == ([0, 1], [0.0, 1.0])
