"""Files that were flipped, torn, cut short, copied or are somebody else's: skipped and counted."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store.arena import key_index
from kvray.store.arena.layout import BUCKET_WAYS, QUARANTINED
from kvray.store.nvme import NvmeStore
from kvray.store.nvme.record import HEADER, PAGE_BYTES, RECORD, seal
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import (
    SEGMENT,
    SHAPE,
    demote,
    open_store,
    present,
    promote,
    spec,
    table_of,
)
from tests.unit.store.small_arena import SLOT, chain

KEYS = chain(12)


def filled(directory: Path) -> Path:
    """Store KEYS; return the one segment file."""
    store = open_store(directory)
    demote(store, KEYS)
    store.close()
    (path,) = directory.glob("segment-*")
    return path


def flip(path: Path, at: int, bit: int = 0) -> None:
    memory = bytearray(path.read_bytes())
    memory[at] ^= 1 << bit
    path.write_bytes(memory)


def rewrite(path: Path, row: int, **values: object) -> None:
    """Change fields of one record and seal it, as only the store itself could."""
    table = table_of(path)
    one = np.array(table[row : row + 1])
    for name, value in values.items():
        one[name] = value
    segment_id = int(np.fromfile(path, HEADER, 1)["segment_id"][0])
    seal(one, segment_id=segment_id, first_row=row)
    table[row] = one[0]
    table.flush()


def open_again(directory: Path) -> NvmeStore:
    store = open_store(directory)
    check_invariants(store.tables)
    return store


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return filled(tmp_path_factory.mktemp("image")).read_bytes()


@settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    at=st.one_of(
        st.integers(0, HEADER.itemsize - 1),
        st.integers(PAGE_BYTES, PAGE_BYTES + SHAPE.num_slots * RECORD.itemsize - 1),
        st.integers(SHAPE.payload_offset, SHAPE.file_bytes - 1),
    ),
    bit=st.integers(0, 7),
)
def test_one_flipped_bit_costs_one_block_or_the_file_and_nothing_wrong_is_served(
    directory: Path, image: bytes, at: int, bit: int
) -> None:
    for old in directory.glob("segment-*"):
        old.unlink()
    path = directory / "segment-00000000"
    path.write_bytes(image)
    flip(path, at, bit)
    store = open_again(directory)
    sound = int(np.count_nonzero(promote(store, KEYS).sound))
    if at < PAGE_BYTES:
        assert (sound, len(store.report.aside)) == (0, 1)
    else:
        assert sound >= len(KEYS) - 1
    store.close()


def test_flipped_record_is_skipped_and_counted_once(directory: Path) -> None:
    flip(filled(directory), PAGE_BYTES + 3 * RECORD.itemsize + 40)
    store = open_again(directory)
    report = store.report
    assert (report.blocks, report.damaged, report.parentless) == (11, 1, 1)
    assert present(store, KEYS) == 11
    store.flush()
    store.close()
    again = open_again(directory)
    assert (again.report.blocks, again.report.damaged) == (11, 0)
    again.close()


def test_parentless_blocks_are_found_again_with_their_parent(directory: Path) -> None:
    flip(filled(directory), PAGE_BYTES)
    store = open_again(directory)
    assert store.report.parentless == 1
    assert demote(store, KEYS).tolist() == [True], "only the parent is written again"
    assert promote(store, KEYS).sound.all()
    check_invariants(store.tables)
    store.close()


def test_flipped_payload_is_quarantined_counted_and_gone_for_good(directory: Path) -> None:
    flip(filled(directory), SHAPE.payload_offset + 5 * SLOT + 100)
    store = open_again(directory)
    assert promote(store, KEYS).sound.tolist() == [True] * 5 + [False] + [True] * 6
    assert store.stats().corrupt == 1
    assert int(np.count_nonzero(store.tables.slot_state == QUARANTINED)) == 1
    assert present(store, KEYS[5:6]) == 0
    store.flush()
    store.close()
    again = open_again(directory)
    assert (again.report.blocks, present(again, KEYS[5:6])) == (11, 0)
    assert demote(again, KEYS).all()
    assert promote(again, KEYS).sound.all()
    again.close()


def test_record_that_was_copied_to_another_row_is_no_record(directory: Path) -> None:
    path = filled(directory)
    table = table_of(path)
    table[14] = table[2]
    table.flush()
    store = open_again(directory)
    assert (store.report.blocks, store.report.damaged, store.report.duplicates) == (12, 1, 0)
    store.close()


def test_record_of_another_segment_is_no_record(directory: Path) -> None:
    store = open_store(directory)
    demote(store, chain(20))
    store.close()
    first, second = sorted(directory.glob("segment-*"))
    table_of(second)[:] = table_of(first)
    again = open_again(directory)
    assert again.report.damaged == 16
    again.close()


def test_younger_of_two_records_of_a_block_counts(directory: Path) -> None:
    path = filled(directory)
    old = np.array(table_of(path)[4])
    fields = {name: old[name] for name in ("key", "parent", "part", "depth", "length")}
    rewrite(path, 13, **fields, payload_checksum=1, sequence=int(old["sequence"]) - 1, used=1)
    store = open_again(directory)
    assert (store.report.blocks, store.report.duplicates) == (12, 1)
    assert promote(store, KEYS).sound.all()
    store.close()


def test_numbers_go_on_above_all_that_were_given(directory: Path) -> None:
    path = filled(directory)
    rewrite(path, 0, sequence=10**6)
    store = open_again(directory)
    demote(store, chain(1, seed="new"))
    slots = key_index.find(store.tables, key_index.pack_keys(chain(1, seed="new")), 0)
    store.close()
    assert int(table_of(path)["sequence"][slots[0]]) > 10**6


@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES, PAGE_BYTES + 1000])
def test_file_without_its_table_gives_no_block(directory: Path, left: int) -> None:
    path = filled(directory)
    with path.open("r+b") as file:
        file.truncate(left)
    store = open_again(directory)
    assert present(store, KEYS) == 0
    assert demote(store, KEYS).all()
    assert promote(store, KEYS).sound.all()
    store.close()


def test_blocks_behind_the_end_of_a_truncated_file_are_skipped(directory: Path) -> None:
    path = filled(directory)
    with path.open("r+b") as file:
        file.truncate(SHAPE.payload_offset + 4 * SLOT + 5)
    store = open_again(directory)
    assert (store.report.blocks, store.report.truncated) == (4, 8)
    assert promote(store, KEYS).sound.tolist() == [True] * 4 + [False] * 8
    assert path.stat().st_size == SHAPE.file_bytes
    assert demote(store, KEYS).all()
    assert promote(store, KEYS).sound.all()
    store.close()


def test_file_that_was_cut_while_the_store_is_open_is_a_miss(directory: Path) -> None:
    path = filled(directory)
    store = open_again(directory)
    with path.open("r+b") as file:
        file.truncate(SHAPE.payload_offset + 4 * SLOT)
    assert promote(store, KEYS).sound.tolist() == [True] * 4 + [False] * 8
    assert store.stats().unreadable == 8
    store.close()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (spec(name="other"), "cluster"),
        (spec(segment=2 * SEGMENT), "geometry"),
    ],
)
def test_file_that_is_not_this_tiers_is_put_aside(directory: Path, asked, reason) -> None:  # type: ignore[no-untyped-def]
    before = filled(directory).read_bytes()
    store = open_store(directory, asked)
    assert store.report.aside == (f"segment-00000000.{reason}",)
    assert (directory / f"segment-00000000.{reason}").read_bytes() == before
    keys = chain(3, seed="new")
    assert demote(store, keys).all()
    store.close()
    again = open_store(directory, asked)
    assert (again.report.aside, again.report.blocks) == ((), 3)
    again.close()


def test_file_of_another_version_is_put_aside(directory: Path) -> None:
    flip(filled(directory), 8, bit=3)
    store = open_store(directory)
    assert store.report.aside == ("segment-00000000.version",)
    store.close()


def test_second_file_with_the_same_fate_gets_a_name_of_its_own(directory: Path) -> None:
    image = filled(directory).read_bytes()
    for _ in range(2):
        path = directory / "segment-00000000"
        path.write_bytes(image)
        flip(path, 8, bit=3)
        open_store(directory).close()
    assert sorted(path.name for path in directory.glob("segment-*")) == [
        "segment-00000000.version",
        "segment-00000000.version-2",
    ]


def test_copy_of_a_segment_is_put_aside(directory: Path) -> None:
    path = filled(directory)
    shutil.copy(path, directory / "segment-00000007")
    store = open_again(directory)
    assert store.report.aside == ("segment-00000007.copy",)
    assert promote(store, KEYS).sound.all()
    store.close()


def test_file_that_was_never_finished_is_removed_and_others_are_left_alone(directory: Path) -> None:
    filled(directory)
    (directory / "segment-00000009.new").write_bytes(b"half")
    foreign = [directory / name for name in ("notes.txt", "segment-1", "segment-x.new")]
    for path in foreign:
        path.write_bytes(b"mine")
    store = open_again(directory)
    assert not (directory / "segment-00000009.new").exists()
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert (store.report.blocks, store.report.aside) == (12, ())
    store.close()


def test_blocks_that_find_no_place_in_the_index_are_counted(directory: Path) -> None:
    store = open_store(directory)
    demote(store, chain(20))
    store.close()
    for number, path in enumerate(sorted(directory.glob("segment-*"))):
        for row in range(16 if number == 0 else 4):
            key = np.array([80, 16 * number + row, 1, 1], dtype="<u8")  # of one bucket
            rewrite(path, row, key=key, parent=np.zeros(4, dtype="<u8"), depth=0)
    again = open_again(directory)
    assert (again.report.blocks, again.report.crowded) == (BUCKET_WAYS, 20 - BUCKET_WAYS)
    again.close()


def test_a_key_of_the_right_record_is_what_is_served(directory: Path) -> None:
    """A record that is sealed with another block's key has that key's checksum against it."""
    path = filled(directory)
    stranger = chain(1, seed="stranger")
    rewrite(path, 0, key=key_index.pack_keys(stranger)[0])
    store = open_again(directory)
    assert not promote(store, [BlockKey(stranger[0])]).sound.any()
    store.close()
