"""docs/nvme_format.md says what the code does, byte for byte."""

from pathlib import Path

import numpy as np
import xxhash

from kvray.store.nvme import recovery
from kvray.store.nvme.record import FORMAT_VERSION, HEADER, PAGE_BYTES, RECORD
from tests.unit.store.conftest import ROOT
from tests.unit.store.nvme.small_store import demote, open_store
from tests.unit.store.small_arena import SLOT, chain, content

PAGE = (ROOT / "docs" / "nvme_format.md").read_text()
STEP = 0x9E3779B97F4A7C15


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below `heading`, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def in_code(dtype: "np.dtype[np.void]") -> list[list[str]]:
    assert dtype.fields is not None
    assert dtype.names is not None
    listed = []
    for name in dtype.names:
        kind, at = dtype.fields[name][:2]
        shape = f" x {kind.shape[0]}" if kind.shape else ""
        listed.append([str(at), name, kind.base.str.lstrip("<|") + shape])
    return listed


def test_version_is_that_of_the_code() -> None:
    assert PAGE.startswith(f"# The NVMe tier's format, version {FORMAT_VERSION}\n")
    assert ["8", "format_version", "u8", str(FORMAT_VERSION)] in [r[:4] for r in rows("Header")]


def test_header_and_record_have_their_fields_where_the_page_says() -> None:
    assert [row[:3] for row in rows("Header")] == in_code(HEADER)
    assert [row[:3] for row in rows("Record")] == in_code(RECORD)


def test_record_lies_in_one_sector() -> None:
    assert RECORD.itemsize == 128
    assert 512 % RECORD.itemsize == 0
    assert HEADER.itemsize <= 512


def test_counts_have_the_names_of_the_report() -> None:
    named = [row[1].split("`")[0].strip() for row in rows("At the start")]
    named = [one.rstrip(":") for one in named if one.rstrip(":").isidentifier()]
    fields = recovery.RecoveryReport.__dataclass_fields__
    assert named
    assert set(named) <= set(fields)


def test_block_is_found_by_the_page_alone(directory: Path) -> None:
    """Follow the page from a key to the bytes, over the file as it is."""
    keys = chain(5)
    store = open_store(directory)
    demote(store, keys, part=3, block_bytes=SLOT + 10)
    store.close()
    file = (directory / "segment-00000000").read_bytes()

    def u8(at: int) -> int:
        return int.from_bytes(file[at : at + 8], "little")

    assert (file[:8], file[16:80].rstrip(b"\0")) == (b"KVRAYNVM", b"test")
    assert u8(152) == xxhash.xxh3_64_intdigest(file[:152])
    segment_id, stride, num_slots, table, payload = map(u8, (80, 112, 120, 128, 136))
    assert (u8(144), payload) == (len(file), PAGE_BYTES + -(-num_slots * 128 // 4096) * 4096)
    found = [at for at in range(num_slots) if file[table + at * 128 :][:32] == keys[2]]
    (slot,) = found
    record = file[table + slot * 128 :][:128]
    seed = segment_id ^ (slot * STEP % 2**64)
    assert int.from_bytes(record[120:], "little") == xxhash.xxh3_64_intdigest(record[:120], seed)
    assert record[32:64] == keys[1]
    assert np.frombuffer(record[64:72], "<u4").tolist() == [3, 2]
    length = int.from_bytes(record[72:80], "little")
    block = file[payload + slot * stride :][:length]
    assert block == content(keys[2], 3, block_bytes=SLOT + 10).tobytes()
    seed = int.from_bytes(keys[2][:8], "little") ^ (3 * STEP % 2**64)
    assert int.from_bytes(record[80:88], "little") == xxhash.xxh3_64_intdigest(block, seed)
