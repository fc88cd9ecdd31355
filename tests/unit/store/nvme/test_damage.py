"""Files that were flipped, torn, cut short, copied or somebody else's, and files of any content.

They cost blocks, which are skipped and counted; nothing wrong is ever served from them: `promote`
compares every byte that is called valid.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey
from kvray.store.arena import key_index
from kvray.store.arena.layout import BUCKET_WAYS, QUARANTINED
from kvray.store.arena.tables import Array
from kvray.store.nvme import NvmeStore
from kvray.store.nvme.record import HEADER, MAGIC, PAGE_BYTES, RECORD, _header_checksum, seal
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import (
    SEGMENT,
    SHAPE,
    Reopen,
    demote,
    present,
    promote,
    spec,
    table_of,
)
from tests.unit.store.small_arena import SLOT, chain

KEYS = chain(12)
SEVERAL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Filled:
    """A directory whose one segment file has KEYS, to be damaged and opened again."""

    def __init__(self, directory: Path, reopen: Reopen) -> None:
        self.directory = directory
        self.reopen = reopen
        demote(reopen(), KEYS)
        reopen().close()
        (self.path,) = directory.glob("segment-*")
        self.image = self.path.read_bytes()

    def put(self, memory: bytes) -> None:
        """Let the one file have this content."""
        for old in self.directory.glob("segment-*"):
            old.unlink()
        self.path.write_bytes(memory)

    def flip(self, at: int, bit: int = 0) -> None:
        memory = np.memmap(self.path, np.uint8, "r+")
        memory[at] ^= 1 << bit


def check_written_again(store: NvmeStore) -> None:
    """Fail unless KEYS can be stored and read as if nothing had been."""
    assert demote(store, KEYS).all()
    assert promote(store, KEYS).all()


@pytest.fixture
def filled(directory: Path, reopen: Reopen) -> Filled:
    return Filled(directory, reopen)


def segment_id_of(path: Path) -> int:
    return int(np.fromfile(path, HEADER, 1)["segment_id"][0])


def rewrite(path: Path, row: int, **values: object) -> None:
    """Change fields of one record and seal it, as only the store itself could."""
    table = table_of(path)
    one = np.array(table[row : row + 1])
    for name, value in values.items():
        one[name] = value
    seal(one, segment_id=segment_id_of(path), first_row=row)
    table[row] = one[0]
    table.flush()


@settings(SEVERAL, max_examples=examples(150))
@given(
    at=st.one_of(
        st.integers(0, HEADER.itemsize - 1),
        st.integers(PAGE_BYTES, PAGE_BYTES + SHAPE.num_slots * RECORD.itemsize - 1),
        st.integers(SHAPE.payload_offset, SHAPE.file_bytes - 1),
    ),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_costs_one_block_or_the_file_and_serves_nothing_wrong(filled, at, bit):
    filled.put(filled.image)
    filled.flip(at, bit)
    store = filled.reopen()
    valid = int(np.count_nonzero(promote(store, KEYS)))
    if at < PAGE_BYTES:
        assert (valid, len(store.report.aside)) == (0, 1)
    else:
        assert valid >= len(KEYS) - 1


def test_flipped_record_is_skipped_and_counted_once(filled):
    filled.flip(PAGE_BYTES + 3 * RECORD.itemsize + 40)
    store = filled.reopen()
    assert (store.report.blocks, store.report.damaged, store.report.parentless) == (11, 1, 1)
    assert present(store, KEYS) == 11
    store.flush()
    store = filled.reopen()
    assert (store.report.blocks, store.report.damaged) == (11, 0)
    assert demote(store, KEYS).tolist() == [True], "only the one is written"
    check_written_again(store)


def test_flipped_payload_is_quarantined_counted_and_gone_for_good(filled):
    filled.flip(SHAPE.payload_offset + 5 * SLOT + 100)
    store = filled.reopen()
    assert promote(store, KEYS).tolist() == [True] * 5 + [False] + [True] * 6
    assert store.stats().corrupt == 1
    assert int(np.count_nonzero(store.tables.slot_state == QUARANTINED)) == 1
    assert present(store, KEYS[5:6]) == 0
    store.flush()
    store = filled.reopen()
    assert (store.report.blocks, present(store, KEYS[5:6])) == (11, 0)
    check_written_again(store)


def test_record_that_was_copied_to_another_row_or_segment_is_no_record(directory, reopen):
    demote(reopen(), chain(20))
    reopen().close()
    first, second = (table_of(path) for path in sorted(directory.glob("segment-*")))
    second[:] = first
    first[5] = first[2]
    report = reopen().report
    assert (report.blocks, report.damaged, report.duplicates) == (15, 17, 0)


def test_younger_of_two_records_of_a_block_counts(filled):
    old = np.array(table_of(filled.path)[4])
    fields = {name: old[name] for name in ("key", "parent", "part", "depth", "length")}
    earlier = int(old["sequence"]) - 1
    rewrite(filled.path, 13, **fields, payload_checksum=1, sequence=earlier, used=1)
    store = filled.reopen()
    assert (store.report.blocks, store.report.duplicates) == (12, 1)
    assert promote(store, KEYS).all()


def test_numbers_go_on_above_all_that_were_given(filled):
    rewrite(filled.path, 0, sequence=10**6)
    store = filled.reopen()
    demote(store, chain(1, seed="new"))
    slots = key_index.find(store.tables, key_index.pack_keys(chain(1, seed="new")), 0)
    store.close()
    assert int(table_of(filled.path)["sequence"][slots[0]]) > 10**6


@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES, PAGE_BYTES + 1000])
def test_file_without_its_table_gives_no_block(filled, left):
    os.truncate(filled.path, left)
    store = filled.reopen()
    assert present(store, KEYS) == 0
    check_written_again(store)


def test_blocks_behind_the_end_of_a_truncated_file_are_skipped(filled):
    os.truncate(filled.path, SHAPE.payload_offset + 4 * SLOT + 5)
    store = filled.reopen()
    assert (store.report.blocks, store.report.truncated) == (4, 8)
    assert promote(store, KEYS).tolist() == [True] * 4 + [False] * 8
    assert filled.path.stat().st_size == SHAPE.file_bytes
    check_written_again(store)
    os.truncate(filled.path, SHAPE.payload_offset + 4 * SLOT)
    assert promote(store, KEYS).tolist() == [True] * 4 + [False] * 8, "cut while it is open"
    assert store.stats().unreadable == 8


@pytest.mark.parametrize(
    ("asked", "reason"),
    [(spec(cluster_name="other"), "cluster"), (spec(segment=2 * SEGMENT), "geometry")],
)
def test_a_file_of_another_tier_is_put_aside(filled, asked, reason):
    store = filled.reopen(asked)
    assert store.report.aside == (f"segment-00000000.{reason}",)
    assert (filled.directory / f"segment-00000000.{reason}").read_bytes() == filled.image
    assert demote(store, chain(3, seed="new")).all()
    report = filled.reopen(asked).report
    assert (report.aside, report.blocks) == ((), 3)


def test_copies_and_files_of_another_version_are_put_aside_each_under_its_own_name(filled):
    shutil.copy(filled.path, filled.directory / "segment-00000007")
    store = filled.reopen()
    assert store.report.aside == ("segment-00000007.copy",)
    assert promote(store, KEYS).all()
    for name in ("segment-00000000.version", "segment-00000000.version-2"):
        filled.path.write_bytes(filled.image)
        filled.flip(8, bit=3)
        store = filled.reopen()
        assert store.report.aside == (name,)
        store.close()
        assert (filled.directory / name).exists()


def test_a_file_that_was_never_finished_is_removed_and_others_stay(filled):
    half = filled.directory / "segment-00000009.new"
    half.write_bytes(b"half")
    foreign = [filled.directory / name for name in ("notes.txt", "segment-1", "segment-x.new")]
    for path in foreign:
        path.write_bytes(b"mine")
    report = filled.reopen().report
    assert not half.exists()
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert (report.blocks, report.aside) == (12, ())


def test_blocks_without_a_place_in_the_index_are_counted(directory, reopen):
    demote(reopen(), chain(20))
    reopen().close()
    places = [(path, row) for path in sorted(directory.glob("segment-*")) for row in range(16)]
    for number, (path, row) in enumerate(places[:20]):
        key = np.array([80, number, 1, 1], dtype="<u8")  # of one bucket
        rewrite(path, row, key=key, parent=np.zeros(4, dtype="<u8"), depth=0)
    report = reopen().report
    assert (report.blocks, report.crowded) == (BUCKET_WAYS, 20 - BUCKET_WAYS)


def test_a_key_of_the_right_record_is_what_is_served(filled):
    """A record that is sealed with another block's key has that key's checksum against it."""
    stranger = chain(1, seed="stranger")
    rewrite(filled.path, 0, key=key_index.pack_keys(stranger)[0])
    assert not promote(filled.reopen(), [BlockKey(stranger[0])]).any()


# -- any content: checksums are right, so that what stands behind them is looked at ---------------

WORDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 4096, 2**31, 2**32, 2**63, 2**64 - 1])
HALVES = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])


RECORDS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("part", "depth", "hits"), HALVES),
        **dict.fromkeys(("length", "payload_checksum", "sequence", "used", "namespace"), WORDS),
        **dict.fromkeys(("key", "parent"), st.lists(WORDS, min_size=4, max_size=4)),
        "priority": st.integers(0, 255),
    },
)
SIZES = ("number", "stride", "num_slots", "table_offset", "payload_offset", "file_bytes")
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(SIZES, WORDS),
        "cluster_name": st.binary(max_size=64),
        "block_bytes": WORDS | st.integers(1, 2**17),
    },
)


def look(filled: Filled) -> Array:
    """Open what is there and use it; return a mask of KEYS, those that were read."""
    store = filled.reopen()
    found = promote(store, KEYS)
    demote(store, chain(3, seed="more"))
    check_invariants(store.tables)
    store.close()
    return found


@settings(SEVERAL, max_examples=examples(60))
@given(
    head=st.binary(max_size=200) | st.binary(max_size=200).map(MAGIC.__add__),
    size=st.sampled_from([0, 1, PAGE_BYTES, 3 * PAGE_BYTES + 5, SHAPE.file_bytes]),
)
def test_a_file_of_any_bytes_is_put_aside(filled, head, size):
    filled.put(head.ljust(size, b"\1")[:size])
    look(filled)


@settings(SEVERAL, max_examples=examples(60))
@given(fields=HEADERS)
def test_any_header_goes_or_is_used(filled, fields):
    memory = bytearray(filled.image)
    header = np.frombuffer(memory, HEADER, count=1)
    for name, value in fields.items():
        header[name] = value
    header["checksum"] = _header_checksum(bytes(memory[:PAGE_BYTES]))
    filled.put(memory)
    look(filled)


@settings(SEVERAL, max_examples=examples(60))
@given(
    changes=st.lists(
        st.tuples(st.integers(0, SHAPE.num_slots - 1), RECORDS),
        min_size=1,
        max_size=SHAPE.num_slots,
    )
)
def test_records_of_any_figures_cost_blocks_and_serve_none_that_is_wrong(filled, changes):
    filled.put(filled.image)
    table = table_of(filled.path)
    records = np.array(table)
    packed = key_index.pack_keys(KEYS)
    rows = [int(np.flatnonzero((records["key"] == key).all(axis=1))[0]) for key in packed]
    for row, fields in changes:
        for name, value in fields.items():
            records[row][name] = value
    seal(records, segment_id=segment_id_of(filled.path), first_row=0)
    table[:] = records
    table.flush()
    found = look(filled)
    changed = {row for row, fields in changes if fields}
    assert found[[row not in changed for row in rows]].all(), "a record costs its own block only"
