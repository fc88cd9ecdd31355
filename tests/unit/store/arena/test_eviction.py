"""Who goes first: least recently used, a prefix from its tail, never what somebody leases.

Blocks of no use go before all others, then what is over a quota, then lower priorities.
"""

import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import eviction, key_index, lease, quotas, slots
from kvray.store.arena.eviction import keep_evictable
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    find,
    make_tables,
    matched,
    put,
    served,
    store,
    take,
    victims,
)

MINE, THEIRS, OTHERS = 0x11111111, 0x22222222, 0x33333333


def touch(tables: Tables, keys: list[BlockKey]) -> None:
    lease.release(tables, take(tables, keys))


def test_one_long_chain_in_pieces_gives_all_that_is_asked():
    tables = make_tables(num_slabs=64)
    keys = chain(512)
    for start in range(0, 512, 4):
        put(tables, keys[start : start + 4], parent=keys[start - 1] if start else None, depth=start)
    made = put(tables, chain(400, seed="new"))
    assert (len(made.slots), made.dropped) == (400, 0)
    assert matched(tables, keys) == 112
    check_invariants(tables)


def test_save_extends_its_own_chain_in_a_full_arena_without_losing_it(tables):
    keys = chain(64)
    put(tables, keys[:60])
    put(tables, chain(4, seed="other"))
    made = put(tables, keys)
    assert (made.rows.tolist(), made.dropped) == ([60, 61, 62, 63], 0)
    assert matched(tables, keys) == 64


# -- what is of no use ----------------------------------------------------------------------------


def give_up(arena: Arena, keys: list[BlockKey], *parts: int) -> int:
    return ArenaOwner(arena).give_up(b"".join(keys), parts)


def test_parts_that_are_named_are_given_up_unless_leased_or_elsewhere(arena):
    keys = chain(1)
    store(arena, keys, part=0)
    other = store(arena, keys, part=1)
    assert give_up(arena, keys, 1, 2) == 1
    assert victims(arena.tables, 1) == other.slots.tolist()
    assert arena.lease(keys)
    assert give_up(arena, keys + chain(3, seed="elsewhere"), 0) == 0
    assert give_up(arena, [], 0) == give_up(arena, keys) == 0


def test_a_parent_stays_as_long_as_its_child_is_used_and_what_is_used_again(arena):
    old = store(arena, chain(1, seed="old"))
    keys = chain(2)
    store(arena, keys)
    for given_up, used in ((keys[:1], []), (keys[1:], keys)):
        assert give_up(arena, given_up, 0) == 1
        assert served(arena, used) == len(used)
        assert victims(arena.tables, 1) == old.slots.tolist()


# -- priorities, policies and quotas --------------------------------------------------------------


def test_a_writer_takes_room_from_low_priority_and_from_beyond_quotas():
    tables = make_tables(num_slabs=2)
    keep, low, over = chain(6, seed="keep"), chain(4, seed="low"), chain(6, seed="over")
    put(tables, low, priority=1)
    put(tables, keep, priority=60)
    put(tables, over, priority=100, namespace=MINE)
    quotas.set_quotas(tables, {"11": 5 * SLOT})
    put(tables, chain(4, seed="new"))
    assert (matched(tables, over), matched(tables, low), matched(tables, keep)) == (5, 1, 6)
    put(tables, chain(4, seed="newer"), priority=0)
    assert (matched(tables, over), matched(tables, keep)) == (5, 6)
    check_invariants(tables)


def test_a_writer_spares_what_was_used_since_it_looked():
    tables = make_tables(num_slabs=1)
    used, old = chain(2, seed="used"), chain(2, seed="old")
    for keys in (used, old, chain(4, seed="young")):
        put(tables, keys)
    new = key_index.pack_keys(chain(2, seed="new"))
    place: dict[str, Any] = {"parent": None, "part": 0, "block_bytes": SLOT}
    candidates = slots.find_candidates(tables, new, **place)
    touch(tables, used)
    slots.reserve(tables, new, **place, depth=0, holder=0, candidates=candidates)
    assert (matched(tables, used), matched(tables, old)) == (2, 0)


def test_the_slab_with_the_lowest_priority_is_cleared_for_another_block_size():
    tables = make_tables(num_slabs=2)
    high, low = chain(8, seed="high"), chain(8, seed="low")
    put(tables, high, priority=90)
    put(tables, low, priority=10)
    put(tables, chain(1, seed="large"), block_bytes=2 * SLOT)
    assert (matched(tables, high), matched(tables, low)) == (8, 0)


def test_priorities_hold_under_the_lock_as_well_and_whatever_the_ranks(tables):
    high = put(tables, chain(2, seed="high"), priority=80)
    low = put(tables, chain(2, seed="low"), priority=20)
    chosen = np.concatenate((high.slots, low.slots))
    expected = [*low.slots[::-1], *high.slots[::-1]]
    assert keep_evictable(tables, chosen).tolist() == expected
    ranks = np.full(tables.geometry.num_slots, -np.inf)
    ranks[low.slots] = [-np.inf, 1.0]
    assert victims(tables, 99, rank=ranks.take) == expected


which_one = st.integers(0, 1000)
"""Of the blocks that are there."""
piece = st.tuples(
    which_one,  # to hang it from
    st.integers(1, 6),  # its length
    st.sampled_from([MINE, MINE, THEIRS, OTHERS, 0]),
    st.just(6 * [35]) | st.lists(st.sampled_from([0, 35, 100]), min_size=6, max_size=6),
)


@settings(max_examples=examples(300))
@given(
    asked=st.lists(piece, min_size=1, max_size=14),
    quota=st.dictionaries(st.sampled_from(["11", "22222222", ""]), st.integers(1, 20)),
    touched=st.lists(which_one, max_size=6),
    count=st.integers(0, 64),
    num_special=st.integers(0, 3),
    has_policy=st.booleans(),
)
def test_order_is_that_of_a_plain_search(asked, quota, touched, count, num_special, has_policy):
    tables = make_tables()
    known = grow(tables, asked)
    for which in touched:
        touch(tables, [known[which % len(known)]])
    for which in touched[:num_special]:
        take(tables, [known[which % len(known)]])
    for which in touched[num_special:][:num_special]:
        tables.slot_tick[find(tables, [known[which % len(known)]])] = 0
    quotas.set_quotas(tables, {name: size * SLOT for name, size in quota.items()})
    protect = np.array(find(tables, known[:num_special]), dtype=np.int64)
    # No two are equal: which of two equal blocks is beyond a quota is nobody's concern.
    num_slots = tables.geometry.num_slots
    words = tables.slot_key[:, 1] % np.uint64(5) * np.uint64(num_slots)
    words += np.arange(num_slots, dtype=np.uint64)
    rank = words.astype(np.float64).take if has_policy else None
    plain = Plain(tables, protect, words if has_policy else tables.slot_tick)
    expected = plain.victims(count)
    chosen = victims(tables, count, protect=protect, rank=rank)
    assert [plain.place(one) for one in chosen] == [plain.place(one) for one in expected]
    gone: set[int] = set()
    for one in chosen:
        assert gone.issuperset(plain.children(one))
        gone.add(one)
    slots.evict(tables, np.array(chosen, dtype=np.int64))
    check_invariants(tables)


def grow(tables: Tables, asked: list[tuple[int, int, int, list[int]]]) -> list[BlockKey]:
    """Store pieces of prompts, each in the namespace of what it hangs from."""
    known: list[tuple[BlockKey, int, int]] = []
    for number, (where, length, wanted, priorities) in enumerate(asked):
        parent, depth, namespace = None, -1, wanted
        if known and where % 4:
            parent, depth, namespace = known[where % len(known)]
        keys = chain(length, seed=f"piece {number}")
        made = put(
            tables,
            keys,
            parent=parent,
            depth=depth + 1,
            namespace=namespace,
            priority=np.array(priorities[:length], dtype=np.uint8),
        )
        known += [(keys[row], depth + 1 + int(row), namespace) for row in made.rows]
        known = [one for one in known if find(tables, [one[0]])[0] >= 0]
    return [key for key, _, _ in known]


class Plain:
    """The order of eviction by plain search: the first leaf goes, again and again."""

    def __init__(self, tables: Tables, protect: Array, ranks: Array) -> None:
        self.tables = tables
        self.stays = set(protect.tolist())
        self.ranks = ranks
        self.beyond: set[int] = set()
        beyond: list[int] = []
        ready = np.flatnonzero(tables.slot_state == READY).tolist()
        for namespace in {int(tables.slot_namespace[one]) for one in ready}:
            mine = {one for one in ready if tables.slot_namespace[one] == namespace}
            bound = quotas.quota_of(tables, namespace)
            beyond += self.first(mine, 0 if bound is None else len(mine) - bound // SLOT)
        self.beyond = set(beyond)

    def victims(self, count: int) -> list[int]:
        return self.first(set(np.flatnonzero(self.tables.slot_state == READY).tolist()), count)

    def first(self, left: set[int], count: int) -> list[int]:
        chosen: list[int] = []
        depth = self.tables.slot_depth
        while len(chosen) < count:
            leaves = [one for one in left if self.can_go(one, set(chosen))]
            if not leaves:
                break
            chosen.append(min(leaves, key=lambda one: (self.place(one), -int(depth[one]))))
            left.remove(chosen[-1])
        return chosen

    def can_go(self, slot: int, gone: set[int]) -> bool:
        is_free = not self.tables.slot_leases[slot] and slot not in self.stays
        return is_free and gone.issuperset(self.children(slot))

    def children(self, slot: int) -> list[int]:
        tables = self.tables
        return list(np.flatnonzero((tables.slot_parent == slot) & (tables.slot_state == READY)))

    def place(self, slot: int) -> tuple[int, int, float]:
        """Return the place of a block in the order, which is that of the last of its family."""
        tables, rank = self.tables, float(self.ranks[slot])
        own = 0 if slot in self.beyond else 1, int(tables.slot_priority[slot]), rank
        if not tables.slot_tick[slot]:
            own = (-1, 0, rank)
        return max([own, *(self.place(child) for child in self.children(slot))])


def test_what_was_stored_in_the_place_of_what_the_owner_chose_is_not_evicted(arena, monkeypatch):
    old, new = chain(64), chain(16, seed="new")
    store(arena, old)
    choose = eviction.choose_victims

    def choose_slowly(tables: Tables, count: int, **options: Any) -> Array:
        found = choose(tables, count, **options)
        assert store(arena, new).dropped == 0  # in the slots of the oldest blocks
        return found

    monkeypatch.setattr(eviction, "choose_victims", choose_slowly)
    ArenaOwner(arena).evict_ahead(0.5)
    assert served(arena, new) == 16
    monkeypatch.undo()
    assert ArenaOwner(arena).evict_ahead(0.5) > 0
    assert served(arena, new) == 16


def test_a_clear_ends_although_others_go_on_storing(arena, monkeypatch):
    owner, choose, coming = ArenaOwner(arena), eviction.choose_victims, iter("abcdefgh")
    store(arena, chain(20))

    def choose_slowly(*args: Any, **options: Any) -> Array:
        found = choose(*args, **options)
        if (seed := next(coming, None)) is not None:
            store(arena, chain(1, seed=seed))
        return found

    monkeypatch.setattr(eviction, "choose_victims", choose_slowly)
    assert owner.clear() == 20
    assert next(coming, None) is not None, "it was not kept busy to the end"


def test_a_search_that_had_to_wait_for_a_core_puts_off_no_other(arena, monkeypatch):
    owner, choose = ArenaOwner(arena), eviction.choose_victims

    def choose_late(*args: Any, **options: Any) -> Array:
        time.sleep(0.5)
        return choose(*args, **options)

    store(arena, chain(64))
    monkeypatch.setattr(eviction, "choose_victims", choose_late)
    owner.evict_ahead(0.25)
    assert arena.stats()["blocks"] == 48
    monkeypatch.undo()
    for seed in "ab":
        store(arena, chain(16, seed=seed))
        owner.evict_ahead(0.25)
        assert arena.stats()["blocks"] == 48
