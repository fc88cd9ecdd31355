"""What the namespaces of an arena take, what they may, and that its owner keeps them within it."""

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import eviction, owner, quotas, slots
from kvray.store.arena.layout import DEFAULT_PRIORITY, QUOTAS_MAX
from kvray.store.arena.tables import Array
from tests.unit.store.small_arena import SLOT, chain, make_tables, num_here, put, reserve, store

ABCD, ABEF = (int.from_bytes(bytes.fromhex(name), "little") for name in ("abcd0000", "abef0000"))


@pytest.mark.parametrize("count", [0, 2, 40])  # so many are summed up one by one, or all at once
def test_every_namespace_takes_what_its_ready_blocks_have(count):
    tables = make_tables(num_slabs=16)
    assert quotas.excess(tables) == {}
    for namespace in range(count):
        keys, size = chain(1 + namespace % 3, seed=str(namespace)), SLOT * (1 + namespace % 2)
        put(tables, keys, namespace=namespace, block_bytes=size)
    reserve(tables, chain(4, seed="under way"), namespace=1)
    sums = {one: (1 + one % 3, (1 + one % 3) * (1 + one % 2) * SLOT) for one in range(count)}
    assert quotas.used(tables) == sums


def test_blocks_that_go_while_others_are_ranked_do_not_count(tables):
    for number in range(2):
        put(tables, chain(8, seed=str(number)), namespace=5)
    quotas.set_quotas(tables, {"": SLOT})

    def rank(found: Array) -> Array:
        slots.evict(tables, found)  # by an engine: the owner ranks without the lock
        return np.arange(len(found), dtype=float)

    chosen = eviction.choose_beyond_quotas(tables, SLOT, rank)
    assert set(chosen.tolist()) <= set(range(16)), "they are candidates, which eviction checks"


@pytest.mark.parametrize(
    ("names", "bounds"),
    [
        (
            {"": 1, "ab": 2, "ABcd": 3, "abcd0000" + 56 * "1": 4},
            {ABCD: 4, ABCD + 2**31: 3, ABEF: 2, 1: 1},
        ),
        ({"abcd": 3}, {ABEF: None}),
        ({}, {ABCD: None}),
        ({"": 1}, {0: None}),  # it is not known
    ],
)
def test_the_longest_name_that_fits_says_the_quota_if_any_does(tables, names, bounds):
    assert quotas.name_of(ABCD) == "abcd0000"
    quotas.set_quotas(tables, {"abcd": 9})
    quotas.set_quotas(tables, names)
    assert {namespace: quotas.quota_of(tables, namespace) for namespace in bounds} == bounds


@pytest.mark.parametrize("names", [["xyz"], [str(number) for number in range(QUOTAS_MAX + 1)]])
def test_quotas_that_cannot_be_kept_are_refused(tables, names):
    with pytest.raises(ConfigError):
        quotas.set_quotas(tables, dict.fromkeys(names, 1))
    assert not np.any(tables.quota_bytes)


# -- the owner keeps namespaces within their quotas -----------------------------------------------

MINE, THEIRS = 0x11111111, 0x22222222


def own(arena: Arena, **num_blocks: int) -> ArenaOwner:
    """Adopt an arena with quotas in blocks."""
    names = {"mine": "11111111", "theirs": "22222222", "each": ""}
    made = ArenaOwner(arena, {names[one]: count * SLOT for one, count in num_blocks.items()})
    made.adopt()
    return made


def fill(arena: Arena, seed: str, length: int, namespace: int, priority: int = 0) -> None:
    for start in range(0, length, 8):
        keys = chain(min(8, length - start), seed=f"{seed}{start}")
        store(arena, keys, namespace=namespace, priority=priority or DEFAULT_PRIORITY)


def blocks(arena: Arena) -> dict[str, int]:
    return {one["namespace"]: one["blocks"] for one in arena.stats()["namespaces"]}


def test_what_is_over_a_quota_or_that_of_all_goes_though_there_is_room(arena):
    fill(arena, "mine", 9, MINE)
    fill(arena, "theirs", 9, THEIRS)
    fill(arena, "nobody", 9, 0)
    keeper = own(arena, mine=4)
    assert keeper.evict_ahead(0.0) == 5
    assert blocks(arena) == {"": 9, "22222222": 9, "11111111": 4}
    assert (arena.stats()["over_quota"], arena.stats()["evicted"]) == (5, 5)
    assert keeper.evict_ahead(0.0) == 0
    fill(arena, "later", 2, MINE)
    assert keeper.evict_ahead(0.0) == 2
    assert own(arena, each=3).evict_ahead(0.0) == 1 + 6
    assert blocks(arena) == {"": 9, "22222222": 3, "11111111": 3}


@pytest.mark.parametrize(("last_priority", "left"), [(1, [2, 0]), (90, [0, 2]), (0, [2, 0])])
def test_of_a_namespace_lower_priorities_go_and_of_one_what_the_policy_says(
    arena, last_priority, left
):
    fill(arena, "old", 2, MINE)
    fill(arena, "young", 2, MINE, priority=last_priority)
    ticks = arena.tables.slot_tick.astype(float)
    rank = None if last_priority else lambda slots: -ticks[slots]
    assert own(arena, mine=2).evict_ahead(0.0, rank) == 2
    assert [num_here(arena, chain(2, seed=seed)) for seed in ("old0", "young0")] == left


def test_leased_blocks_stay_until_nobody_leases_them(arena):
    fill(arena, "mine", 6, MINE)
    held = arena.lease(chain(6, seed="mine0"))
    keeper = own(arena, mine=4)
    assert keeper.evict_ahead(0.0) == 0
    assert arena.release(*held)
    assert keeper.evict_ahead(0.0) == 2


def test_much_goes_in_several_steps(arena, monkeypatch):
    monkeypatch.setattr(owner, "_QUOTA_STEP", 10)
    monkeypatch.setattr(owner, "EVICT_BATCH", 4)
    fill(arena, "mine", 40, MINE)
    keeper = own(arena, mine=12)
    assert [keeper.evict_ahead(0.0) for _ in range(4)] == [10, 10, 8, 0]


def test_the_next_owner_has_its_own_quotas_or_is_none(arena):
    fill(arena, "mine", 6, MINE)
    own(arena, mine=4)
    assert own(arena).evict_ahead(0.0) == 0
    epoch = arena.tables.counts.shard_epoch
    with pytest.raises(ConfigError):
        ArenaOwner(arena, {"model": 1}).adopt()
    assert arena.tables.counts.shard_epoch == epoch


def test_figures_say_what_namespaces_have_and_may_have(arena):
    fill(arena, "mine", 3, MINE)
    fill(arena, "nobody", 1, 0)
    own(arena, mine=4)
    assert [list(one.values()) for one in arena.stats()["namespaces"]] == [
        ["11111111", 3, 3 * SLOT, 4 * SLOT],
        ["", 1, SLOT, None],
    ]
