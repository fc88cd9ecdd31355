"""docs/arena_format.md and docs/nvme_format.md say what the code does, byte for byte."""

import math
import re

import numpy as np
import xxhash

from kvray.store import ArenaSpec
from kvray.store.arena import layout
from kvray.store.nvme import record, recovery
from tests.unit.store.fork_server import ROOT
from tests.unit.store.nvme.small_store import demote, open_store
from tests.unit.store.small_arena import SLOT, chain, content, store

ARENA, NVME = ((ROOT / "docs" / f"{one}_format.md").read_text() for one in ("arena", "nvme"))
DEFAULT = ArenaSpec(
    cluster_name="test", capacity=4 * 2**30, slab=64 * 2**20, slot_min=64 * 2**10, holders_max=256
).geometry()
STEP = 0x9E3779B97F4A7C15


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below `heading`, without its head."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def in_code(dtype: "np.dtype[np.void]") -> list[list[str]]:
    listed = []
    for name, (kind, at, *_) in (dtype.fields or {}).items():
        shape = f" x {kind.shape[0]}" if kind.shape else ""
        listed.append([str(at), name, kind.base.str.lstrip("<|") + shape])
    return listed


def test_versions_are_those_of_the_code():
    assert ARENA.startswith(f"# The arena's format, version {layout.FORMAT_VERSION}\n")
    assert ["8", "format_version", "u4", str(layout.FORMAT_VERSION)] in rows(ARENA, "Header")
    assert NVME.startswith(f"# The NVMe tier's format, version {record.FORMAT_VERSION}\n")
    said = [row[:4] for row in rows(NVME, "Header")]
    assert ["8", "format_version", "u8", str(record.FORMAT_VERSION)] in said


def test_headers_and_records_have_their_fields_where_the_pages_say():
    assert [row[:3] for row in rows(ARENA, "Header")] == in_code(layout.HEADER)
    assert [row[:3] for row in rows(NVME, "Header")] == in_code(record.HEADER)
    assert [row[:3] for row in rows(NVME, "Record")] == in_code(record.RECORD)
    assert (512 % record.RECORD.itemsize, record.RECORD.itemsize) == (0, 128), "in one sector"
    assert record.HEADER.itemsize <= 512


def test_tables_stand_where_the_page_says():
    offsets, end = DEFAULT.offsets(), layout.HEADER.itemsize
    for row, (name, dtype, shape) in zip(rows(ARENA, "Tables"), DEFAULT.tables(), strict=True):
        assert [row[0], row[1], offsets[name]] == [name, dtype.lstrip("<"), -(-end // 4096) * 4096]
        end = offsets[name] + np.dtype(dtype).itemsize * math.prod(shape)
    assert f"by default at byte {offsets['data']}." in ARENA


def test_shapes_follow_from_the_header_as_the_page_says():
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
    for row in rows(ARENA, "Tables"):
        dimensions = [part.strip() for part in row[2].split(",")]
        assert [names.get(one) or int(one) for one in dimensions] == in_code[row[0]], row[0]


def test_columns_of_the_undo_record_have_the_numbers_of_the_page(tables):
    named = re.findall(r"(\d+) `(\w+)`", ARENA.split("know them by:")[1].split("All else")[0])
    assert [(int(code), name) for code, name in named] == list(enumerate(tables.columns))


def test_a_block_of_an_arena_is_found_by_the_page_alone(arena):
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


def test_counts_have_the_names_of_the_report():
    named = [row[1].split("`")[0].strip() for row in rows(NVME, "At the start")]
    named = [one.rstrip(":") for one in named if one.rstrip(":").isidentifier()]
    fields = recovery.RecoveryReport.__dataclass_fields__
    assert named
    assert set(named) <= set(fields)


def test_a_block_on_disk_is_found_by_the_page_alone(tmp_path):
    """Follow the page from a key to the bytes, over the file as it is."""
    keys = chain(5)
    store = open_store(tmp_path)
    demote(store, keys, part=3, block_bytes=SLOT + 10)
    store.close()
    file = (tmp_path / "segment-00000000").read_bytes()

    def u8(at: int) -> int:
        return int.from_bytes(file[at : at + 8], "little")

    assert (file[:8], file[16:80].rstrip(b"\0")) == (b"KVRAYNVM", b"test")
    assert u8(152) == xxhash.xxh3_64_intdigest(file[:152])
    segment_id, stride, num_slots, table, payload = map(u8, (80, 112, 120, 128, 136))
    assert (u8(144), payload) == (len(file), record.PAGE_BYTES + -(-num_slots * 128 // 4096) * 4096)
    (slot,) = [at for at in range(num_slots) if file[table + at * 128 :][:32] == keys[2]]
    entry = file[table + slot * 128 :][:128]
    seed = segment_id ^ (slot * STEP % 2**64)
    assert int.from_bytes(entry[120:], "little") == xxhash.xxh3_64_intdigest(entry[:120], seed)
    assert entry[32:64] == keys[1]
    assert np.frombuffer(entry[64:72], "<u4").tolist() == [3, 2]
    length = int.from_bytes(entry[72:80], "little")
    block = file[payload + slot * stride :][:length]
    assert block == content(keys[2], 3, block_bytes=SLOT + 10).tobytes()
    seed = int.from_bytes(keys[2][:8], "little") ^ (3 * STEP % 2**64)
    assert int.from_bytes(entry[80:88], "little") == xxhash.xxh3_64_intdigest(block, seed)
