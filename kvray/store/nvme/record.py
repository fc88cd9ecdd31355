"""A segment file's contents: a header, a record for each slot, and where they lie.

Pure: bytes in, bytes out. `docs/nvme_format.md` describes the same, byte for byte.

A power loss leaves each record old or new, because it lies in one sector of 512 bytes, which a
drive writes whole or not at all. A page that is written again has its other records unchanged, so
no mixture of sectors changes them. The checksum reveals everything else.
"""

from dataclasses import dataclass

import numpy as np
import xxhash

from kvray.identity.block import KEY_BYTES
from kvray.store.arena.layout import ALIGNMENT, Array, Geometry, align

MAGIC = b"KVRAYNVM"
FORMAT_VERSION = 2
PAGE_BYTES = ALIGNMENT
"""Unit of writing: the header, a page of a table, a multiple of it of payload."""

HEADER = np.dtype(
    [
        # The first three have their places in every version of the format.
        ("magic", "S8"),
        ("format_version", "<u8"),
        ("cluster_name", "S64"),
        ("segment_id", "<u8"),
        ("number", "<u8"),
        ("created", "<f8"),
        ("block_bytes", "<u8"),
        ("stride", "<u8"),
        ("num_slots", "<u8"),
        ("table_offset", "<u8"),
        ("payload_offset", "<u8"),
        ("file_bytes", "<u8"),
        ("checksum", "<u8"),
    ]
)

RECORD = np.dtype(
    [
        ("key", "<u8", (KEY_BYTES // 8,)),
        ("parent", "<u8", (KEY_BYTES // 8,)),
        ("part", "<u4"),
        ("depth", "<u4"),
        ("length", "<u8"),
        ("payload_checksum", "<u8"),
        ("sequence", "<u8"),
        ("used", "<u8"),
        ("namespace", "<u8"),
        ("hits", "<u4"),
        ("priority", "u1"),
        ("head", "u1", (3,)),
        ("checksum", "<u8"),
    ]
)

RECORDS_PER_PAGE = PAGE_BYTES // RECORD.itemsize

_DERIVED = ("stride", "num_slots", "table_offset", "payload_offset", "file_bytes")
"""Fields of the header that follow from the geometry and the block size."""
_SUMMED_BYTES = RECORD.itemsize - 8
_ROW_STEP = 0x9E3779B97F4A7C15
"""An odd constant: seeds of neighbouring rows have nothing in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """Where everything lies in a segment file; follows from geometry and block size."""

    block_bytes: int
    stride: int
    num_slots: int

    @classmethod
    def of(cls, geometry: Geometry, block_bytes: int) -> "SegmentShape":
        """Return the shape of a segment for blocks of `block_bytes`."""
        stride = geometry.stride(block_bytes)
        return cls(block_bytes=block_bytes, stride=stride, num_slots=geometry.slab_bytes // stride)

    @property
    def table_offset(self) -> int:
        """Behind the header, so that one read takes both."""
        return PAGE_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of the table, whole pages."""
        return align(self.num_slots * RECORD.itemsize)

    @property
    def payload_offset(self) -> int:
        """Byte of the first slot."""
        return self.table_offset + self.table_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file, which it has from its creation on."""
        return self.payload_offset + self.num_slots * self.stride


def make_header(
    shape: SegmentShape, *, cluster_name: str, segment_id: int, number: int, created: float
) -> bytes:
    """Return the page that a segment file begins with."""
    header = np.zeros((), dtype=HEADER)
    header["magic"] = MAGIC
    header["format_version"] = FORMAT_VERSION
    header["cluster_name"] = cluster_name.encode()
    header["segment_id"] = segment_id
    header["number"] = number
    header["created"] = created
    for name in ("block_bytes", *_DERIVED):
        header[name] = getattr(shape, name)
    header["checksum"] = _header_checksum(header.tobytes())
    return header.tobytes().ljust(PAGE_BYTES, b"\0")


def read_header(
    page: bytes, *, cluster_name: str, number: int, geometry: Geometry
) -> "tuple[int, SegmentShape] | str":
    """Return the id and shape of a file that begins with `page`, or in one word why it is refused.

    `number` is the segment's number in its file's name; `cluster_name` and `geometry` are the
    tier's.
    """
    if len(page) < PAGE_BYTES or not page.startswith(MAGIC):
        return "unknown"
    header = np.frombuffer(page, HEADER, count=1)[0]
    if header["format_version"] != FORMAT_VERSION:
        return "version"
    if int(header["checksum"]) != _header_checksum(page):
        return "damaged"
    if header["cluster_name"] != cluster_name.encode():
        return "cluster"
    block_bytes = int(header["block_bytes"])
    if int(header["number"]) != number:
        return "copy"
    if not 0 < block_bytes <= geometry.slab_bytes:
        return "geometry"
    shape = SegmentShape.of(geometry, block_bytes)
    if any(int(header[name]) != getattr(shape, name) for name in _DERIVED):
        return "geometry"
    return int(header["segment_id"]), shape


def seal(records: Array, *, segment_id: int, first_row: int) -> None:
    """Write the checksums of a segment's `records` from slot `first_row` on; empty stay zero."""
    rows = np.flatnonzero(~is_empty(records))
    records["checksum"][rows] = _checksums(records, rows, segment_id, first_row)


def is_valid(records: Array, *, segment_id: int, first_row: int) -> Array:
    """Return a mask of the records that were written whole for the place where they lie."""
    rows = np.flatnonzero(~is_empty(records))
    valid = np.zeros(len(records), dtype=bool)
    sums: Array = _checksums(records, rows, segment_id, first_row)
    valid[rows] = sums == records["checksum"][rows]
    return valid


def heads_of(records: Array) -> Array:
    """Return the head number of each record's chain, u4; 0: not known, as in older records."""
    heads = np.zeros((len(records), 4), dtype="u1")
    heads[:, :3] = records["head"]
    return heads.view("<u4").ravel()


def is_empty(records: Array) -> Array:
    """Return a mask of the records that are all zero: no block was ever there, or it went."""
    words = records.view("<u8").reshape(len(records), -1)
    empty: Array = np.logical_not(words.any(axis=1))
    return empty


def _checksums(records: Array, rows: Array, segment_id: int, first_row: int) -> Array:
    """Return the xxh3 of each of `rows`, seeded with its place: a copy elsewhere is invalid."""
    memory = records.view("u1").data
    seeds = (rows.astype("<u8") + np.uint64(first_row)) * np.uint64(_ROW_STEP)
    seeds ^= np.uint64(segment_id)
    starts = (rows * RECORD.itemsize).tolist()
    pieces = [memory[start : start + _SUMMED_BYTES] for start in starts]
    return np.array(list(map(xxhash.xxh3_64_intdigest, pieces, seeds.tolist())), dtype="<u8")


def _header_checksum(page: bytes) -> int:
    fields = HEADER.fields
    assert fields is not None
    return int(xxhash.xxh3_64_intdigest(page[: fields["checksum"][1]]))
