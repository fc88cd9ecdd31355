"""docs/arena_format.md says what the code does, byte for byte."""

import re

import numpy as np

from kvray.store import Arena, ArenaSpec
from kvray.store.arena.layout import FORMAT_VERSION, HEADER
from kvray.store.arena.tables import Tables
from tests.unit.store.conftest import ROOT
from tests.unit.store.small_arena import chain, content, store

PAGE = (ROOT / "docs" / "arena_format.md").read_text()
DEFAULT = ArenaSpec(
    cluster_name="test", capacity=4 * 2**30, slab=64 * 2**20, slot_min=64 * 2**10, holders_max=256
).geometry()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below `heading`, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_version_is_that_of_the_code() -> None:
    assert PAGE.startswith(f"# The arena's format, version {FORMAT_VERSION}\n")
    assert ["8", "format_version", "u4", str(FORMAT_VERSION)] in rows("Header")


def test_header_has_its_fields_where_the_page_says() -> None:
    assert HEADER.fields is not None
    in_code = [
        [str(HEADER.fields[name][1]), name, HEADER.fields[name][0].str.lstrip("<|")]
        for name in HEADER.names or ()
    ]
    assert [row[:3] for row in rows("Header")] == in_code


def test_tables_stand_where_the_page_says() -> None:
    offsets = DEFAULT.offsets()
    in_code = [[name, dtype.lstrip("<"), str(offsets[name])] for name, dtype, _ in DEFAULT.tables()]
    assert [[row[0], row[1], row[-1]] for row in rows("Tables")] == in_code
    assert f"here at byte {offsets['data']}." in PAGE


def test_shapes_follow_from_the_header_as_the_page_says() -> None:
    geometry = DEFAULT
    names = {
        "S": geometry.capacity // geometry.slot_min,
        "B": max(16, 1 << (geometry.capacity // geometry.slot_min // 4 - 1).bit_length()),
        "H": geometry.holders_max,
        "P": min(65_536, max(64, geometry.capacity // geometry.slot_min // 16)),
        "Q": max(128, geometry.num_slots // 2),
        "E": max(4096, geometry.num_slots // 4),
        "capacity / slab_bytes": geometry.capacity // geometry.slab_bytes,
        "16 U + 4096": 16 * min(65_536, geometry.num_slots) + 4096,
    }
    in_code = {name: list(shape) for name, _, shape in geometry.tables()}
    for row in rows("Tables"):
        dimensions = [part.strip() for part in row[2].split(",")]
        assert [names.get(one) or int(one) for one in dimensions] == in_code[row[0]], row[0]


def test_columns_of_the_undo_record_have_the_numbers_of_the_page(tables: Tables) -> None:
    named = re.findall(r"(\d+) `(\w+)`", PAGE.split("know them by:")[1].split("All else")[0])
    assert [(int(code), name) for code, name in named] == list(enumerate(tables.columns))


def test_block_is_found_by_the_page_alone(arena: Arena) -> None:
    """Follow the page from a key to the bytes, over the file as it is."""
    keys = chain(5)
    store(arena, keys)
    file = np.fromfile(arena.directory / "arena", dtype=np.uint8)
    geometry = arena.tables.geometry
    offsets = geometry.offsets()
    words = np.frombuffer(keys[3], dtype="<u8")
    num_buckets = 16
    bucket = int(words[0]) % num_buckets
    entries = file[offsets["index_slot"] :].view("<u4")[bucket * 16 :][:16]
    tags = file[offsets["index_tag"] :].view("<u4")[bucket * 16 :][:16]
    (way,) = np.flatnonzero(tags == int(words[1]) % 2**32)
    slot = int(entries[way]) - 1
    slab, row = divmod(slot, geometry.slab_bytes // geometry.slot_min)
    assert file[offsets["slot_state"] + slot] == 2
    start = offsets["data"] + slab * geometry.slab_bytes + row * 4096
    assert (file[start : start + 4096] == content(keys[3])).all()
