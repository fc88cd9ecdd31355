"""Segment files of any content cost blocks, and nothing wrong is ever served from them.

Unlike in `test_damage`, checksums of headers and records are right here, so that what stands behind
them is looked at.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.store.arena import key_index
from kvray.store.arena.tables import Array
from kvray.store.nvme.record import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    PAGE_BYTES,
    _header_checksum,
    seal,
)
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import SHAPE, demote, open_store, promote, table_of
from tests.unit.store.small_arena import chain

KEYS = chain(12)
fuzzed = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

WORDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 4096, 2**31, 2**32, 2**63, 2**64 - 1])
HALVES = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "part": HALVES,
        "depth": HALVES,
        "length": WORDS,
        "payload_checksum": WORDS,
        "sequence": WORDS,
        "used": WORDS,
        "namespace": WORDS,
        "hits": HALVES,
        "priority": st.integers(0, 255),
        "key": st.lists(WORDS, min_size=4, max_size=4),
        "parent": st.lists(WORDS, min_size=4, max_size=4),
    },
)


@pytest.fixture
def image(directory: Path) -> Path:
    """Return a copy of a segment file with KEYS in it."""
    store = open_store(directory)
    demote(store, KEYS)
    store.close()
    (path,) = directory.glob("segment-*")
    return path.rename(directory / "image")


def look(directory: Path) -> Array:
    """Open what is there and use it; return a mask of KEYS, those that were read.

    `promote` compares every byte that is called sound.
    """
    store = open_store(directory)
    check_invariants(store.tables)
    found = promote(store, KEYS).sound
    demote(store, chain(3, seed="more"))
    check_invariants(store.tables)
    store.close()
    return found


def put(directory: Path, memory: bytes) -> Path:
    for old in directory.glob("segment-*"):
        old.unlink()
    path = directory / "segment-00000000"
    path.write_bytes(memory)
    return path


@fuzzed
@given(
    head=st.binary(max_size=200) | st.binary(max_size=200).map(MAGIC.__add__),
    size=st.sampled_from([0, 1, PAGE_BYTES, 3 * PAGE_BYTES + 5, SHAPE.file_bytes]),
)
def test_a_file_of_any_bytes_is_put_aside(directory: Path, head: bytes, size: int) -> None:
    put(directory, head.ljust(size, b"\1")[:size])
    look(directory)


@fuzzed
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "cluster_name": st.binary(max_size=64),
            "number": WORDS,
            "block_bytes": WORDS | st.integers(1, 2**17),
            "stride": WORDS,
            "num_slots": WORDS,
            "table_offset": WORDS,
            "payload_offset": WORDS,
            "file_bytes": WORDS,
        },
    )
)
def test_a_header_of_any_figures_is_put_aside_or_used(
    directory: Path, image: Path, fields: dict[str, object]
) -> None:
    memory = bytearray(image.read_bytes())
    header = np.frombuffer(memory, HEADER, count=1)
    for name, value in fields.items():
        header[name] = value
    header["format_version"] = FORMAT_VERSION
    header["checksum"] = _header_checksum(bytes(memory[:PAGE_BYTES]))
    put(directory, memory)
    look(directory)


@fuzzed
@given(
    changes=st.lists(
        st.tuples(st.integers(0, SHAPE.num_slots - 1), FIELDS), min_size=1, max_size=SHAPE.num_slots
    )
)
def test_records_of_any_figures_cost_blocks_and_serve_none_that_is_wrong(
    directory: Path, image: Path, changes: list[tuple[int, dict[str, object]]]
) -> None:
    path = put(directory, image.read_bytes())
    table = table_of(path)
    records = np.array(table)
    packed = key_index.pack_keys(KEYS)
    rows = [int(np.flatnonzero((records["key"] == key).all(axis=1))[0]) for key in packed]
    for row, fields in changes:
        for name, value in fields.items():
            records[row][name] = value
    segment_id = int(np.fromfile(path, HEADER, 1)["segment_id"][0])
    seal(records, segment_id=segment_id, first_row=0)
    table[:] = records
    table.flush()
    found = look(directory)
    changed = {row for row, fields in changes if fields}
    assert found[[row not in changed for row in rows]].all(), "a record costs its own block only"
