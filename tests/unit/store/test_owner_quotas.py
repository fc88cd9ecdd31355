"""The owner of an arena keeps namespaces within their quotas, and tells what they have."""

from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import owner
from kvray.store.arena.layout import DEFAULT_PRIORITY
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, store

MINE, THEIRS = 0x11111111, 0x22222222


def own(arena: Arena, **num_blocks: int) -> ArenaOwner:
    """Adopt an arena with quotas in blocks."""
    names = {"mine": "11111111", "theirs": "22222222", "each": ""}
    made = ArenaOwner(arena, {names[one]: count * SLOT for one, count in num_blocks.items()})
    made.adopt()
    return made


def put(arena: Arena, seed: str, length: int, namespace: int, priority: int = 0) -> None:
    for start in range(0, length, 8):
        keys = chain(min(8, length - start), seed=f"{seed}{start}")
        store(arena, keys, namespace=namespace, priority=priority or DEFAULT_PRIORITY)


def blocks(arena: Arena) -> dict[str, int]:
    return {one["namespace"]: one["blocks"] for one in arena.stats()["namespaces"]}


def test_what_is_over_a_quota_goes_though_there_is_room(arena: Arena) -> None:
    put(arena, "mine", 9, MINE)
    put(arena, "theirs", 9, THEIRS)
    keeper = own(arena, mine=4)
    assert keeper.evict_ahead(0.0) == 5
    assert blocks(arena) == {"22222222": 9, "11111111": 4}
    assert (arena.stats()["over_quota"], arena.stats()["evicted"]) == (5, 5)
    assert keeper.evict_ahead(0.0) == 0
    check_invariants(arena.tables)


def test_every_namespace_is_kept_within_the_quota_of_all(arena: Arena) -> None:
    put(arena, "mine", 9, MINE)
    put(arena, "theirs", 7, THEIRS)
    put(arena, "nobody", 9, 0)
    assert own(arena, each=6).evict_ahead(0.0) == 4
    assert blocks(arena) == {"": 9, "11111111": 6, "22222222": 6}


def test_of_a_namespace_the_lower_priorities_go(arena: Arena) -> None:
    put(arena, "low", 2, MINE, priority=1)
    put(arena, "high", 2, MINE, priority=90)
    own(arena, mine=2).evict_ahead(0.0)
    assert arena.match(chain(2, seed="high0")) == 2
    assert arena.match(chain(2, seed="low0")) == 0


def test_of_one_priority_the_policy_decides(arena: Arena) -> None:
    put(arena, "old", 2, MINE)
    put(arena, "young", 2, MINE)
    keeper = own(arena, mine=2)
    ticks = arena.tables.slot_tick.astype(float)
    assert keeper.evict_ahead(0.0, lambda slots: -ticks[slots]) == 2
    assert (arena.match(chain(2, seed="old0")), arena.match(chain(2, seed="young0"))) == (2, 0)


def test_what_comes_later_is_kept_within_the_quota_as_well(arena: Arena) -> None:
    keeper = own(arena, mine=4)
    assert keeper.evict_ahead(0.0) == 0
    put(arena, "mine", 6, MINE)
    assert keeper.evict_ahead(0.0) == 2


def test_leased_blocks_stay_until_nobody_leases_them(arena: Arena) -> None:
    put(arena, "mine", 6, MINE)
    held = arena.lease(chain(6, seed="mine0"))
    keeper = own(arena, mine=4)
    assert keeper.evict_ahead(0.0) == 0
    assert held
    arena.release(*held)
    assert keeper.evict_ahead(0.0) == 2


def test_much_goes_in_several_steps(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_QUOTA_STEP", 10)
    monkeypatch.setattr(owner, "EVICT_BATCH", 4)
    put(arena, "mine", 40, MINE)
    keeper = own(arena, mine=12)
    assert [keeper.evict_ahead(0.0) for _ in range(4)] == [10, 10, 8, 0]
    check_invariants(arena.tables)


def test_the_next_owner_has_its_own_quotas(arena: Arena) -> None:
    put(arena, "mine", 6, MINE)
    own(arena, mine=4)
    assert own(arena).evict_ahead(0.0) == 0
    assert own(arena, each=5).evict_ahead(0.0) == 1


def test_quotas_that_cannot_be_kept_end_the_adoption(arena: Arena) -> None:
    epoch = arena.tables.shard_epoch
    with pytest.raises(ConfigError):
        ArenaOwner(arena, {"model": 1}).adopt()
    assert arena.tables.shard_epoch == epoch


def test_figures_say_what_namespaces_have_and_may_have(arena: Arena) -> None:
    put(arena, "mine", 3, MINE)
    put(arena, "nobody", 1, 0)
    own(arena, mine=4)
    expected: list[dict[str, Any]] = [
        {"namespace": "11111111", "blocks": 3, "bytes": 3 * SLOT, "quota_bytes": 4 * SLOT},
        {"namespace": "", "blocks": 1, "bytes": SLOT, "quota_bytes": None},
    ]
    assert arena.stats()["namespaces"] == expected
