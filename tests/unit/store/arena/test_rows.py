"""The rows of the slot tables: whose they are, and which of them have memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import CapacityError
from kvray.store import Arena, ArenaOwner
from kvray.store.arena import audit, prefault
from kvray.store.arena import file as arena_file
from kvray.store.arena.layout import ALIGNMENT, RUN_SLOTS, Geometry
from kvray.store.arena.prefault import Populator, pieces_of
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, fetch, make_arena, spec, store

KEYS = chain(100)
MIXED = [SLOT, 2 * SLOT, 3 * SLOT, 40 * SLOT]


@given(num_slabs=st.integers(1, 9), slots_per_slab=st.integers(1, 300))
def test_every_place_has_a_row_of_its_own(num_slabs: int, slots_per_slab: int) -> None:
    slab_bytes = slots_per_slab * SLOT
    geometry = Geometry(
        capacity=num_slabs * slab_bytes, slab_bytes=slab_bytes, slot_min=SLOT, holders_max=1
    )
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


def test_an_arena_of_few_rows_has_memory_for_all(arena: Arena) -> None:
    tables = arena.tables
    assert (tables.missing_rows, tables.num_backed) == (0, tables.geometry.num_slots)
    assert memory(arena) == tables.geometry.file_bytes


def test_rows_that_large_blocks_never_use_have_no_memory(thrifty: Arena) -> None:
    geometry, before = thrifty.tables.geometry, memory(thrifty)
    assert thrifty.tables.num_backed == RUN_SLOTS * 40
    missing = geometry.spans(range(RUN_SLOTS * 40, geometry.num_slots))
    unused = sum(stop - start for start, stop in missing)
    assert geometry.file_bytes - unused <= before < geometry.file_bytes - unused * 0.8
    store(thrifty, KEYS, block_bytes=4 * SLOT)
    held = thrifty.lease(KEYS)
    assert held
    assert fetch(thrifty, KEYS, held[0], block_bytes=4 * SLOT)
    thrifty.release(*held)
    owner = ArenaOwner(thrifty)
    while not owner.is_audited:
        assert not owner.audit()
    owner.mend()
    assert thrifty.stats()["blocks"] == len(KEYS)
    Populator(thrifty.tables)._thread.join()
    owner.clear()
    assert memory(thrifty) == before, "no look at the tables touches a row without memory"


def test_smaller_blocks_are_dropped_until_the_owner_has_added_their_rows(thrifty: Arena) -> None:
    owner, tables = ArenaOwner(thrifty), thrifty.tables
    store(thrifty, KEYS[:50], block_bytes=4 * SLOT)
    assert owner.add_rows() == 0, "nobody has asked"
    made = store(thrifty, KEYS[50:], block_bytes=SLOT)
    assert (len(made.slots), made.dropped) == (0, 50)
    assert owner.add_rows() == 3 * RUN_SLOTS * 40
    assert (tables.missing_rows, owner.add_rows()) == (0, 0)
    assert memory(thrifty) == tables.geometry.file_bytes
    assert len(store(thrifty, KEYS[50:], block_bytes=SLOT).slots) == 50
    for keys, size in ((KEYS[:50], 4 * SLOT), (KEYS[50:], SLOT)):
        held = thrifty.lease(keys)
        assert held
        assert fetch(thrifty, keys, held[0], block_bytes=size)
        thrifty.release(*held)
    check_invariants(tables)


def test_only_as_many_rows_are_added_as_the_size_needs(thrifty: Arena) -> None:
    store(thrifty, KEYS, block_bytes=2 * SLOT)
    assert ArenaOwner(thrifty).add_rows() == RUN_SLOTS * 40
    assert len(store(thrifty, KEYS, block_bytes=2 * SLOT).slots) == len(KEYS)
    assert store(thrifty, chain(3, seed="small")).dropped == 3


def test_rows_for_which_there_is_no_memory_are_refused(
    thrifty: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(thrifty, KEYS[:3])

    def full(*_pieces: object, **_options: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_file, "populate", full)
    with pytest.raises(CapacityError, match=r"bytes more.*No space left.*arena\.slot_min"):
        ArenaOwner(thrifty).add_rows()
    assert store(thrifty, KEYS[:3]).dropped == 3
    assert len(store(thrifty, KEYS[:3], block_bytes=4 * SLOT).slots) == 3


def test_rows_get_memory_where_the_kernel_cannot_populate(
    thrifty: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(thrifty, KEYS[:3])
    monkeypatch.setattr(prefault, "_populate", lambda _chunk: False)
    assert ArenaOwner(thrifty).add_rows()
    assert memory(thrifty) == thrifty.tables.geometry.file_bytes
    assert len(store(thrifty, KEYS[:3]).slots) == 3


def test_pieces_with_memory_are_whole_pages_and_leave_out_the_rest(thrifty: Arena) -> None:
    pieces = pieces_of(thrifty.tables)
    assert len(pieces) > 10
    assert all(piece.nbytes % ALIGNMENT == 0 for piece in pieces)
    assert sum(piece.nbytes for piece in pieces) == memory(thrifty)


def test_a_slab_whose_size_has_no_rows_is_mended(thrifty: Arena) -> None:
    store(thrifty, KEYS, block_bytes=4 * SLOT)
    tables, owner = thrifty.tables, ArenaOwner(thrifty)
    tables.slab_block_bytes[30] = SLOT
    found: dict[str, int] = {}
    for _ in audit.shares(tables):
        found |= owner.audit()
    assert "slabs" in found
    assert tables.slab_block_bytes[30] == 0
    assert thrifty.match(KEYS) == len(KEYS)
    check_invariants(tables)


@given(chosen=st.lists(st.tuples(st.sampled_from(MIXED), st.integers(1, 90)), max_size=12))
def test_blocks_of_mixed_sizes_are_read_as_they_were_stored(
    chosen: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as directory:
        asked = spec(num_slabs=5, slots_per_slab=2 * RUN_SLOTS + 2)
        arena = make_arena(Path(directory), asked=asked)
        arena.join("test")
        for number, (size, count) in enumerate(chosen):
            keys = chain(count, seed=str(number))
            store(arena, keys, block_bytes=size)
            held = arena.lease(keys) or []
            for one in held:
                assert fetch(arena, keys, one, block_bytes=size)
            arena.release(*held)
            check_invariants(arena.tables)
        arena.close()
