"""Leases are records: a slot's count follows from them, and they end by release or death."""

import dataclasses
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvray.store.arena import audit, key_index, lease
from kvray.store.arena.layout import PAGE_SLOTS
from kvray.store.arena.lease import Lease, PartRequest
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, find, make_tables, put, slots_named, take

NAMES = ("token", "another")
names = st.sampled_from(NAMES)
holders = st.integers(0, 2)


class LeaseLife(RuleBasedStateMachine):
    """Leases of many pages, several at once, cut short, of one name, and of holders that leave."""

    leases = Bundle("leases")
    """Those without a name; others of a name are as good as one that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = make_tables(num_slabs=100)
        keys = chain(2 * PAGE_SLOTS + 3)
        put(self.tables, keys)
        self.slots = np.array(find(self.tables, keys))
        self.alive: dict[Lease, tuple[int, str | None, list[int]]] = {}
        """The model: those that have not ended, with their holder, name and slots."""

    def end(self, of: int | str) -> int:
        """Forget the leases of a holder or a name; return how many slots they had."""
        gone = [one for one, its in self.alive.items() if of in its[:2]]
        return sum(len(self.alive.pop(one)[2]) for one in gone)

    @rule(
        target=leases,
        lengths=st.lists(
            st.sampled_from([1, 3, PAGE_SLOTS, 2 * PAGE_SLOTS + 3]), min_size=1, max_size=24
        ),
        holder=holders,
        name=st.none() | names,
    )
    def take(self, lengths: list[int], holder: int, name: str | None) -> object:
        readers = [np.append(self.slots[: one - 1], self.slots[0]) for one in lengths]
        known_by = None if name is None else lease.id_of(name)
        taken = lease.take(self.tables, readers, holder=holder, now=0.0, lease_id=known_by)
        all_lengths = [*lengths, *(len(slots) for *_, slots in self.alive.values())]
        num_pages = sum(-(-one // PAGE_SLOTS) for one in all_lengths)
        assert (taken is not None) == (num_pages <= self.tables.geometry.num_pages)
        for one, slots in zip(taken or (), readers if taken else (), strict=True):
            self.alive[one] = holder, name, slots.tolist()
        return multiple(*(taken or ()) if name is None else ())

    @rule(one=leases, num_slots=st.integers(1, 600))
    def release(self, one: Lease, num_slots: int) -> None:
        narrow = dataclasses.replace(one, num_slots=min(num_slots, one.num_slots))
        if one in self.alive:
            *_, slots = self.alive.pop(one)
            assert slots_named(self.tables, narrow) == slots[: narrow.num_slots]
            assert lease.release(self.tables, narrow)
        assert lease.leased_slots(self.tables, one) is None
        assert not lease.release(self.tables, one)

    @rule(name=names)
    def release_a_name(self, name: str) -> None:
        ids = [lease.id_of(one) for one in NAMES]
        pages = [lease.records(self.tables, one) for one in ids]
        mine = NAMES.index(name)
        for its, expected in ((1 - mine, 0), (mine, self.end(name)), (mine, 0)):
            assert lease.release_records(self.tables, ids[mine], pages[its]) == expected

    @rule(holder=holders)
    def release_holder(self, holder: int) -> None:
        mine = [one for one, its in self.alive.items() if its[0] == holder]
        assert lease.release_holder(self.tables, holder) == self.end(holder)
        assert not any(lease.release(self.tables, one) for one in mine)

    @invariant()
    def leases_name_their_slots_and_are_counted(self) -> None:
        check_invariants(self.tables)
        counts = Counter[int]()
        for one, (*_, slots) in self.alive.items():
            assert slots_named(self.tables, one) == slots
            counts.update(slots)
        expected = np.zeros(self.tables.geometry.num_slots, dtype=np.int64)
        expected[list(counts)] = list(counts.values())
        assert (self.tables.slot_leases == expected).all()


LeaseLife.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestLeaseLife = LeaseLife.TestCase


def test_lease_that_never_was_is_refused(tables):
    for page in (-1, 0, tables.geometry.num_pages, 10_000):
        assert not lease.release(tables, Lease(lease_id=7, page=page, num_slots=3, check=0))
        never = Lease(lease_id=0, page=page, num_slots=1, check=0)
        assert lease.leased_slots(tables, never) is None


def test_long_leases_are_named_with_their_slots(tables):
    keys = chain(4)
    put(tables, keys)
    take(tables, keys, holder=1, now=10.0)
    take(tables, keys[:1], holder=1, now=12.0)
    take(tables, keys, holder=2, now=30.0)
    assert lease.long_leases(tables, before=20.0) == [(1, 5)]


def test_pages_that_can_be_no_lease_are_forgotten(tables):
    keys = chain(4)
    put(tables, keys)
    good = take(tables, keys)
    bad = [take(tables, keys) for _ in range(5)]
    tables.page_count[bad[0].page] = PAGE_SLOTS + 1
    tables.page_slots[bad[1].page, 2] = tables.geometry.num_slots
    tables.page_slots[bad[2].page, 1] = 40
    tables.page_holder[bad[3].page] = tables.geometry.holders_max + 1
    tables.page_holder[bad[4].page] = -5
    audit.drop_invalid_leases(tables)
    tables.slot_leases[:] = lease.count_leases(tables)
    assert slots_named(tables, good)
    assert [lease.leased_slots(tables, one) for one in bad] == [None] * 5


def test_match_ends_where_a_part_ends_and_a_window_wants_only_trailing_blocks(tables):
    keys = chain(6)
    for part, (start, stop) in enumerate(((0, 6), (0, 5), (3, 5))):
        put(tables, keys[start:stop], part=part)
    wanted = [PartRequest(0), PartRequest(1), PartRequest(2, window=2)]
    run, slots = lease.match(tables, key_index.pack_keys(keys), wanted)
    assert run == 5
    for one, start in zip(wanted, (0, 0, 3), strict=True):
        assert slots[one].tolist() == find(tables, keys[start:5], part=one.part)


@given(
    here=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=3),
    windows=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_usable_prefixes_are_those_of_a_search(here, windows):
    pairs = [(window, np.array(mask)) for window, mask in zip(windows, here, strict=False)]

    def fits(run: int) -> bool:
        return all(mask[max(0, run - window) : run].all() for window, mask in pairs)

    assert lease.usable_lengths(8, pairs).tolist() == list(filter(fits, range(9)))


@given(
    st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4),
    st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12)),
)
def test_places_name_the_blocks_that_a_lease_has_of_a_stretch(windows, numbers):
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


def test_a_block_of_another_size_counts_as_missing(tables):
    keys = chain(4)
    put(tables, keys[:3])
    put(tables, keys[3:], block_bytes=SLOT - 8)
    packed = key_index.pack_keys(keys)

    def run(*requests: PartRequest) -> int:
        found, slots = lease.match(tables, packed, requests)
        assert all(len(one) <= found for one in slots.values())
        return found

    any_size = PartRequest(0)
    assert (run(any_size), run(any_size, PartRequest(0, None, SLOT))) == (4, 3)
    for window, runs in ((None, [3, 0]), (1, [3, 4]), (2, [3, 0])):
        assert [run(PartRequest(0, window, size)) for size in (SLOT, SLOT - 8)] == runs
