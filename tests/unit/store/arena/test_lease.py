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

    def __init__(self) -> None:
        super().__init__()
        self.tables = make_tables(num_slabs=100)
        keys = chain(2 * PAGE_SLOTS + 3)
        put(self.tables, keys)
        self.slots = np.array(find(self.tables, keys))
        self.alive: dict[Lease, tuple[int, list[int]]] = {}
        """The model: those that have not ended, with their holder and slots."""
        self.named: list[tuple[str, int]] = []
        """Name and holder of each lease of a name, of three slots."""

    def has_room(self, num_pages: int) -> bool:
        used = [-(-len(slots) // PAGE_SLOTS) for _, slots in self.alive.values()]
        return sum(used) + len(self.named) + num_pages <= self.tables.geometry.num_pages

    @rule(
        target=leases,
        lengths=st.lists(
            st.sampled_from([1, 3, PAGE_SLOTS, 2 * PAGE_SLOTS + 3]), min_size=1, max_size=24
        ),
        holder=holders,
    )
    def take(self, lengths: list[int], holder: int) -> object:
        readers = [np.append(self.slots[: one - 1], self.slots[0]) for one in lengths]
        taken = lease.take(self.tables, readers, holder=holder, now=0.0)
        assert (taken is not None) == self.has_room(sum(-(-one // PAGE_SLOTS) for one in lengths))
        for one, slots in zip(taken or (), readers if taken else (), strict=True):
            self.alive[one] = holder, slots.tolist()
        return multiple(*(taken or ()))

    @rule(one=leases, num_slots=st.integers(1, 600))
    def release(self, one: Lease, num_slots: int) -> None:
        narrow = dataclasses.replace(one, num_slots=min(num_slots, one.num_slots))
        if one in self.alive:
            slots = self.alive.pop(one)[1]
            assert slots_named(self.tables, narrow) == slots[: narrow.num_slots]
            assert lease.release(self.tables, narrow)
        assert lease.leased_slots(self.tables, one) is None
        assert not lease.release(self.tables, one)

    @rule(name=names, holder=holders)
    def take_of_a_name(self, name: str, holder: int) -> None:
        named = lease.id_of(name)
        taken = lease.take(self.tables, [self.slots[:3]], holder=holder, now=0.0, lease_id=named)
        assert (taken is not None) == self.has_room(1)
        if taken:
            self.named.append((name, holder))

    @rule(name=names)
    def release_a_name(self, name: str) -> None:
        ids = [lease.id_of(one) for one in NAMES]
        pages = [lease.records(self.tables, one) for one in ids]
        mine = NAMES.index(name)
        count = sum(one == name for one, _ in self.named)
        for its, expected in ((1 - mine, 0), (mine, 3 * count), (mine, 0)):
            assert lease.release_records(self.tables, ids[mine], pages[its]) == expected
        self.named = [one for one in self.named if one[0] != name]

    @rule(holder=holders)
    def release_holder(self, holder: int) -> None:
        mine = [one for one, (its, _) in self.alive.items() if its == holder]
        count = sum(len(self.alive.pop(one)[1]) for one in mine)
        count += 3 * sum(its == holder for _, its in self.named)
        self.named = [one for one in self.named if one[1] != holder]
        assert lease.release_holder(self.tables, holder) == count
        assert not any(lease.release(self.tables, one) for one in mine)

    @invariant()
    def leases_name_their_slots_and_are_counted(self) -> None:
        check_invariants(self.tables)
        counts = Counter(self.slots[:3].tolist() * len(self.named))
        for one, (_, slots) in self.alive.items():
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
