"""reserve -> write -> commit, or abort; quarantine, death, reclaim; and the rows of the tables."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.errors import CapacityError
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import audit, prefault, slots
from kvray.store.arena import file as arena_file
from kvray.store.arena.layout import ALIGNMENT, BUCKET_WAYS, RESERVED, RUN_SLOTS, Geometry
from kvray.store.arena.prefault import Populator, pieces_of
from kvray.store.retention import UseCounts, hot_prefixes
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    commit,
    evict,
    make_arena,
    matched,
    num_here,
    put,
    reserve,
    served,
    spec,
    store,
)


@pytest.mark.parametrize("depth", [3, 0], ids=["as told", "as its parent's says"])
def test_chain_goes_on_below_a_parent_that_is_here(tables, depth):
    keys = chain(6)
    head = put(tables, keys[:3])
    tail = put(tables, keys[3:], parent=keys[2], depth=depth)
    assert tables.slot_parent[tail.slots].tolist() == [head.slots[-1], *tail.slots[:-1]]
    assert tables.slot_depth[tail.slots].tolist() == [3, 4, 5]


def test_full_bucket_cuts_the_chain(tables):
    keys = np.zeros((BUCKET_WAYS + 4, 4), dtype="<u8")
    keys[:, 0], keys[:, 1:] = 77, np.arange(1, BUCKET_WAYS + 5)[:, None]
    made = reserve(tables, [BlockKey(key.tobytes()) for key in keys])
    assert (len(made.slots), made.dropped) == (BUCKET_WAYS, 4)


@pytest.mark.parametrize("comes_alone", [False, True])
def test_parentless_blocks_find_their_parent_again(tables, comes_alone):
    keys = chain(5)
    made = put(tables, keys)
    slots.quarantine(tables, made.slots[1:2])
    assert tables.slot_parent[made.slots[2]] == -1
    check_invariants(tables)
    if comes_alone:
        again = put(tables, keys[1:2], parent=keys[0], depth=1)
        assert len(put(tables, keys).slots) == 0
    else:
        again = put(tables, keys)
        assert again.rows.tolist() == [1]
    assert tables.slot_parent[made.slots[2]] == again.slots[0]
    assert matched(tables, keys) == 5


def test_keys_in_a_wrong_order_make_no_block_its_own_ancestor(tables):
    keys = chain(3)
    put(tables, keys)
    reserve(tables, keys[::-1])
    check_invariants(tables)
    assert evict(tables, 3) == 3


def test_late_commit_and_quarantine_cannot_hit_a_slot_that_was_given_on(tables):
    stale = reserve(tables, chain(3, seed="stale"))
    slots.abort(tables, stale)
    assert commit(tables, stale) == 0
    current = reserve(tables, chain(3, seed="current"))
    assert set(stale.slots) == set(current.slots)
    assert commit(tables, stale) == 0
    slots.abort(tables, stale)
    slots.quarantine(tables, current.slots)
    assert set(tables.slot_state[current.slots].tolist()) == {RESERVED}
    assert int(tables.header["corrupt"]) == 0


KEYS = chain(100)


@given(num_slabs=st.integers(1, 9), slots_per_slab=st.integers(1, 300))
def test_every_place_has_a_row_of_its_own(num_slabs, slots_per_slab):
    slab = slots_per_slab * SLOT
    geometry = Geometry(capacity=num_slabs * slab, slab_bytes=slab, slot_min=SLOT, holders_max=1)
    rows = np.arange(geometry.num_slots)
    slab, position = geometry.place_of(rows)
    assert np.array_equal(geometry.slots_at(slab, position), rows)
    assert np.array_equal(geometry.slab_of(rows), slab)
    assert np.array_equal(np.bincount(slab), np.full(num_slabs, slots_per_slab))
    assert np.array_equal(geometry.by_slab(rows).reshape(num_slabs, -1)[slab, position], rows), (
        "a slab's rows, in the order of its bytes"
    )
    for most in range(1, slots_per_slab + 1):
        assert geometry.slots_at(slab, position % most).max() < geometry.rows_for(most)


@pytest.fixture
def thrifty(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena in which one run of every slab has memory."""
    monkeypatch.setattr("kvray.store.arena.layout.FIRST_ROWS", 1)
    arena = make_arena(directory, asked=spec(num_slabs=40, slots_per_slab=4 * RUN_SLOTS))
    arena.join("test")
    yield arena
    arena.close()


def memory(arena: Arena) -> int:
    """Return the bytes of memory that the arena's file has."""
    return (arena.directory / "arena").stat().st_blocks * 512


def test_rows_that_large_blocks_never_use_have_no_memory(thrifty):
    geometry, before = thrifty.tables.geometry, memory(thrifty)
    assert thrifty.tables.num_backed == RUN_SLOTS * 40
    missing = geometry.spans(range(RUN_SLOTS * 40, geometry.num_slots))
    unused = sum(stop - start for start, stop in missing)
    assert geometry.file_bytes - unused <= before < geometry.file_bytes - unused * 0.8
    store(thrifty, KEYS, block_bytes=4 * SLOT)
    assert served(thrifty, KEYS, block_bytes=4 * SLOT) == len(KEYS)
    owner = ArenaOwner(thrifty)
    while not owner.is_audited:
        assert not owner.audit()
    owner.mend()
    assert thrifty.stats()["blocks"] == len(KEYS)
    uses = UseCounts(geometry.num_slots)
    assert hot_prefixes(thrifty.tables, uses, namespace=1, most=5, now=0.0) == []
    Populator(thrifty.tables)._thread.join()
    owner.clear()
    assert memory(thrifty) == before, "no look at the tables touches a row without memory"


@pytest.mark.parametrize("is_older_kernel", [False, True])
def test_smaller_blocks_are_dropped_until_the_owner_has_added_their_rows(
    thrifty, monkeypatch, is_older_kernel
):
    if is_older_kernel:
        monkeypatch.setattr(prefault, "_populate", lambda _chunk: False)
    owner, tables = ArenaOwner(thrifty), thrifty.tables
    store(thrifty, KEYS[:50], block_bytes=4 * SLOT)
    assert owner.add_rows() == 0, "nobody has asked"
    made = store(thrifty, KEYS[50:], block_bytes=SLOT)
    assert (len(made.slots), made.dropped) == (0, 50)
    assert owner.add_rows() == 3 * RUN_SLOTS * 40
    assert (tables.counts.missing_rows, owner.add_rows()) == (0, 0)
    assert memory(thrifty) == tables.geometry.file_bytes
    assert len(store(thrifty, KEYS[50:], block_bytes=SLOT).slots) == 50
    for keys, size in ((KEYS[:50], 4 * SLOT), (KEYS[50:], SLOT)):
        assert served(thrifty, keys, block_bytes=size) == 50
    check_invariants(tables)


def test_only_as_many_rows_are_added_as_the_size_needs(thrifty):
    store(thrifty, KEYS, block_bytes=2 * SLOT)
    assert ArenaOwner(thrifty).add_rows() == RUN_SLOTS * 40
    assert len(store(thrifty, KEYS, block_bytes=2 * SLOT).slots) == len(KEYS)
    assert store(thrifty, chain(3, seed="small")).dropped == 3


def test_rows_without_memory_are_refused(thrifty, monkeypatch):
    store(thrifty, KEYS[:3])
    monkeypatch.setattr(arena_file, "populate", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(CapacityError, match=r"bytes more.*No space left.*arena\.slot_min"):
        ArenaOwner(thrifty).add_rows()
    assert store(thrifty, KEYS[:3]).dropped == 3
    assert len(store(thrifty, KEYS[:3], block_bytes=4 * SLOT).slots) == 3


def test_pieces_with_memory_are_whole_pages_and_leave_out_the_rest(thrifty):
    sizes = [piece.nbytes for piece in pieces_of(thrifty.tables)]
    assert len(sizes) > 10
    assert not any(size % ALIGNMENT for size in sizes)
    assert sum(sizes) == memory(thrifty)


def test_a_slab_whose_size_has_no_rows_is_mended(thrifty):
    store(thrifty, KEYS, block_bytes=4 * SLOT)
    tables, owner = thrifty.tables, ArenaOwner(thrifty)
    tables.slab_block_bytes[30] = SLOT
    found: dict[str, int] = {}
    for _ in audit.shares(tables):
        found |= owner.audit()
    assert "slabs" in found
    assert tables.slab_block_bytes[30] == 0
    assert num_here(thrifty, KEYS) == len(KEYS)
    check_invariants(tables)


@settings(max_examples=examples(100))
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from([SLOT, 2 * SLOT, 3 * SLOT, 40 * SLOT]), st.integers(1, 90)),
        max_size=12,
    )
)
def test_blocks_of_mixed_sizes_are_read_as_stored(chosen):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as directory:
        asked = spec(num_slabs=5, slots_per_slab=2 * RUN_SLOTS + 2)
        arena = make_arena(Path(directory), asked=asked)
        arena.join("test")
        for number, (size, count) in enumerate(chosen):
            keys = chain(count, seed=str(number))
            store(arena, keys, block_bytes=size)
            served(arena, keys, block_bytes=size)
            check_invariants(arena.tables)
        arena.close()
