"""Leases are records: a slot's count follows from them, and they end by release or death."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvray.store.arena import key_index, lease, repair
from kvray.store.arena.layout import PAGE_SLOTS
from kvray.store.arena.lease import Lease, PartRequest
from kvray.store.arena.tables import Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    evict,
    find,
    make_tables,
    matched,
    put,
    reserve,
    slots_named,
    take,
)


def test_match_wants_every_part(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys, part=0)
    put(tables, keys[:3], part=1)
    reserve(tables, keys, part=2)
    assert [matched(tables, keys, num_parts=parts) for parts in (1, 2, 3)] == [4, 3, 0]


def test_match_ends_where_the_first_part_ends(tables: Tables) -> None:
    keys = chain(6)
    for part, count in enumerate((6, 4, 5)):
        put(tables, keys[:count], part=part)
    run, slots = lease.match(tables, key_index.pack_keys(keys), map(PartRequest, range(3)))
    assert run == 4
    for part in range(3):
        assert slots[PartRequest(part)].tolist() == find(tables, keys[:4], part=part)


def test_leases_that_are_taken_at_once_end_one_by_one(tables: Tables) -> None:
    keys = chain(3)
    put(tables, keys)
    put(tables, keys, part=1)
    chosen = [np.array(find(tables, keys, part=part)) for part in range(2)]
    taken = lease.take(tables, [*chosen, chosen[0]], holder=0, now=0.0)
    assert taken is not None
    for one, its in zip(taken, (*chosen, chosen[0]), strict=True):
        assert slots_named(tables, one) == its.tolist()
    for one, left in zip(taken, ([1, 1], [1, 0], [0, 0]), strict=True):
        check_invariants(tables)
        assert lease.release(tables, one)
        assert [tables.slot_leases[its].tolist() for its in chosen] == [3 * [n] for n in left]
    check_invariants(tables)


def test_leases_of_one_name_end_together_and_no_others(tables: Tables) -> None:
    keys = chain(3)
    put(tables, keys)
    chosen = np.array(find(tables, keys))
    named, other = lease.id_of("token"), lease.id_of("another")
    for lease_id, holder in ((named, 0), (named, 1), (other, 0), (None, 0)):
        assert lease.take(tables, [chosen], holder=holder, now=0.0, lease_id=lease_id)
    pages = lease.records(tables, named)
    assert lease.release_records(tables, named, pages) == 6
    assert tables.slot_leases[chosen].tolist() == [2, 2, 2]
    check_invariants(tables)
    assert lease.release_records(tables, named, pages) == 0
    assert not len(lease.records(tables, named))
    assert lease.take(tables, [chosen, chosen], holder=0, now=0.0)
    assert lease.release_records(tables, named, pages) == 0, "others have the pages now"
    assert lease.release_records(tables, other, lease.records(tables, other)) == 3
    assert tables.slot_leases[chosen].tolist() == [3, 3, 3]
    check_invariants(tables)


def test_record_of_many_pages_names_every_slot() -> None:
    count = 2 * PAGE_SLOTS + 3
    tables = make_tables(num_slabs=100)
    keys = chain(count)
    put(tables, keys)
    first, second = take(tables, keys[:1]), take(tables, keys)
    lease.release(tables, first)
    third = take(tables, keys)
    for held in (second, third):
        assert slots_named(tables, held) == find(tables, keys)
    assert tables.slot_leases[find(tables, keys)].tolist() == [2] * count
    check_invariants(tables)
    assert lease.release(tables, second)
    assert lease.release(tables, third)
    assert not tables.slot_leases.any()
    assert not tables.page_holder.any()


def test_second_release_changes_nothing(tables: Tables) -> None:
    keys = chain(3)
    put(tables, keys)
    first, second = take(tables, keys), take(tables, keys)
    assert lease.release(tables, first)
    assert not lease.release(tables, first)
    assert tables.slot_leases[find(tables, keys)].tolist() == [1, 1, 1]
    assert lease.leased_slots(tables, first) is None
    assert slots_named(tables, second)
    check_invariants(tables)


def test_ended_lease_is_not_taken_for_the_one_that_got_its_page(tables: Tables) -> None:
    keys = chain(3)
    put(tables, keys)
    ended = take(tables, keys)
    lease.release(tables, ended)
    tables.next_page = ended.page
    current = take(tables, keys)
    assert current.page == ended.page
    assert not lease.release(tables, ended)
    assert lease.leased_slots(tables, ended) is None
    assert tables.slot_leases[find(tables, keys)].tolist() == [1, 1, 1]


def test_narrowed_lease_ends_as_a_whole() -> None:
    tables = make_tables(num_slabs=64)
    keys = chain(PAGE_SLOTS + 5)
    put(tables, keys)
    held = take(tables, keys)
    narrow = dataclasses.replace(held, num_slots=2)
    assert slots_named(tables, narrow) == find(tables, keys[:2])
    assert lease.release(tables, narrow)
    assert not tables.page_holder.any()
    check_invariants(tables)


def test_lease_that_never_was_is_refused(tables: Tables) -> None:
    for page in (-1, 0, tables.geometry.num_pages, 10_000):
        never = Lease(lease_id=7, page=page, num_slots=3, check=0)
        assert not lease.release(tables, never)
        never = dataclasses.replace(never, lease_id=0, num_slots=1)
        assert lease.leased_slots(tables, never) is None


def test_death_ends_the_leases_of_that_holder_alone(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys)
    dead, alive = take(tables, keys, holder=1), take(tables, keys[:2], holder=2)
    assert lease.release_holder(tables, 1) == 4
    assert lease.leased_slots(tables, dead) is None
    assert slots_named(tables, alive)
    assert tables.slot_leases[find(tables, keys)].tolist() == [1, 1, 0, 0]
    check_invariants(tables)
    assert lease.release_holder(tables, 1) == 0


def test_slot_that_is_leased_twice_over_is_counted_twice(tables: Tables) -> None:
    keys = chain(1)
    put(tables, keys)
    held = take(tables, keys * 2)
    check_invariants(tables)
    assert lease.release(tables, held)
    assert not tables.slot_leases.any()


def test_no_lease_is_given_when_the_pages_are_used_up(tables: Tables) -> None:
    keys = chain(1)
    put(tables, keys)
    slots = np.array(find(tables, keys))
    held = [take(tables, keys) for _ in tables.page_holder]
    assert lease.take(tables, [slots], holder=0, now=0.0) is None
    check_invariants(tables)
    lease.release(tables, held[17])
    assert lease.take(tables, [slots, slots], holder=0, now=0.0) is None
    check_invariants(tables)
    assert lease.take(tables, [slots], holder=0, now=0.0) is not None


def test_taking_a_lease_refreshes_its_blocks(tables: Tables) -> None:
    keys, other = chain(3), chain(3, seed="other")
    put(tables, keys)
    put(tables, other)
    lease.release(tables, take(tables, keys))
    evict(tables, 3)
    assert (matched(tables, keys), matched(tables, other)) == (3, 0)


def test_long_leases_are_named_with_their_slots(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys)
    take(tables, keys, holder=1, now=10.0)
    take(tables, keys[:1], holder=1, now=12.0)
    take(tables, keys, holder=2, now=30.0)
    assert lease.long_leases(tables, before=20.0) == [(1, 5)]


def test_pages_that_can_be_no_lease_are_forgotten(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys)
    good = take(tables, keys)
    bad = [take(tables, keys) for _ in range(5)]
    tables.page_count[bad[0].page] = PAGE_SLOTS + 1
    tables.page_slots[bad[1].page, 2] = tables.geometry.num_slots
    tables.page_slots[bad[2].page, 1] = 40
    tables.page_holder[bad[3].page] = tables.geometry.holders_max + 1
    tables.page_holder[bad[4].page] = -5
    repair.drop_unsound_leases(tables)
    tables.slot_leases[:] = lease.count_leases(tables)
    assert slots_named(tables, good)
    assert [lease.leased_slots(tables, one) for one in bad] == [None] * 5
    check_invariants(tables)


def test_window_wants_only_trailing_blocks(tables: Tables) -> None:
    keys = chain(6)
    put(tables, keys)
    put(tables, keys[3:5], part=1)
    whole, trailing = PartRequest(0), PartRequest(1, window=2)
    run, slots = lease.match(tables, key_index.pack_keys(keys), [whole, trailing])
    assert (run, len(slots[whole])) == (5, 5)
    assert slots[trailing].tolist() == find(tables, keys[3:5], part=1)


@given(
    here=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_usable_windowed_prefixes_are_what_a_search_finds(
    here: list[list[bool]], windows: list[int]
) -> None:
    pairs = [(window, np.array(mask)) for window, mask in zip(windows, here, strict=False)]
    fits = [
        run
        for run in range(9)
        if all(mask[max(0, run - window) : run].all() for window, mask in pairs)
    ]

    assert lease.usable_lengths(8, pairs).tolist() == fits


@given(
    st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4),
    st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12)),
)
def test_places_name_the_blocks_that_a_lease_has_of_a_stretch(
    windows: list[int | None], numbers: tuple[int, int, int]
) -> None:
    num_blocks, *ends = numbers
    first, stop = sorted(min(end, num_blocks) for end in ends)
    parts = [PartRequest(part, window) for part, window in enumerate(windows)]
    leased = [
        (one.part, block)
        for one in parts
        for block in range(num_blocks)
        if one.window is None or block >= num_blocks - one.window
    ]
    found = lease.places(parts, num_blocks, first=first, stop=stop)
    for one, (block, places) in zip(parts, found, strict=True):
        wanted = [entry for entry in leased if entry[0] == one.part and first <= entry[1] < stop]
        assert leased[places] == wanted
        assert not wanted or wanted[0][1] == block


def test_a_block_of_another_size_counts_as_missing(tables: Tables) -> None:
    keys = chain(4)
    put(tables, keys[:3])
    put(tables, keys[3:], block_bytes=SLOT - 8)
    packed = key_index.pack_keys(keys)

    def run(*requests: PartRequest) -> int:
        found, slots = lease.match(tables, packed, requests)
        assert all(len(one) <= found for one in slots.values())
        return found

    any_size, window = PartRequest(0), PartRequest(0, 1, SLOT)
    assert (run(any_size), run(any_size, PartRequest(0, None, SLOT))) == (4, 3)
    assert [run(PartRequest(0, None, size)) for size in (SLOT, SLOT - 8)] == [3, 0]
    assert (run(window), run(PartRequest(0, 1, SLOT - 8))) == (3, 4)
    assert run(PartRequest(0, 2, SLOT - 8)) == 0
