"""One segment file: complete before it has its name, opened only if it is this tier's."""

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvray.errors import TierError
from kvray.store.arena.layout import Array, Geometry
from kvray.store.arena.payload import runs
from kvray.store.nvme.disk import Disk, DiskFile
from kvray.store.nvme.memory import aligned
from kvray.store.nvme.record import (
    PAGE_BYTES,
    RECORDS_PER_PAGE,
    SegmentShape,
    make_header,
    read_header,
    seal,
)

_NAME = re.compile(r"segment-(\d{8})")
_UNFINISHED = ".new"


@dataclass(slots=True, eq=False)
class Segment:
    """An open segment file, owned by this process; from `create_segment` or `open_segment`."""

    file: DiskFile
    number: int
    segment_id: int
    shape: SegmentShape

    def offsets(self, rows: Array) -> Array:
        """Return where each slot's payload lies in the file."""
        return self.shape.payload_offset + rows * self.shape.stride

    def read_table(self, target: Array) -> int:
        """Fill `target`, page-aligned whole pages of RECORD; return how many the file has."""
        end = min(self.file.size(), self.shape.payload_offset)
        pages = max(0, end - self.shape.table_offset) // PAGE_BYTES
        memory = target.view("u1")[: pages * PAGE_BYTES]
        if pages:
            self.file.read([memory], self.shape.table_offset)
        return min(self.shape.num_slots, pages * RECORDS_PER_PAGE)

    def write_pages(self, pages: Array, records: Array) -> None:
        """Seal, in place, and write a copy of pages of records, as `Pages` has them."""
        for start, end in runs(np.diff(pages) != 1, len(pages)):
            run, page = records[start:end].reshape(-1), int(pages[start])
            seal(run, segment_id=self.segment_id, first_row=page * RECORDS_PER_PAGE)
            self.file.write([run.view("u1")], self.shape.table_offset + page * PAGE_BYTES)


def number_of(path: Path) -> int | None:
    """Return the number in a segment file's name; None for other files."""
    named = _NAME.fullmatch(path.name)
    return None if named is None else int(named[1])


def unfinished(directory: Path) -> list[Path]:
    """Return the segment files that are incomplete because their maker died."""
    found = sorted(directory.glob(f"segment-*{_UNFINISHED}"))
    return [path for path in found if number_of(path.with_suffix("")) is not None]


def create_segment(
    disk: Disk, directory: Path, number: int, cluster_name: str, shape: SegmentShape
) -> Segment:
    """Make an empty segment file that survives a power loss once this returns.

    CapacityError: there is no room for it.
    """
    path = directory / f"segment-{number:08d}"
    young = path.with_name(path.name + _UNFINISHED)
    segment_id = secrets.randbits(64)
    page = make_header(
        shape,
        cluster_name=cluster_name,
        segment_id=segment_id,
        number=number,
        created=time.time(),
    )
    with contextlib.ExitStack() as on_failure:
        file = disk.create(young, shape.file_bytes)
        on_failure.callback(_discard, disk, file)
        memory = aligned(PAGE_BYTES)
        memory[:] = np.frombuffer(page, dtype="u1")
        file.write([memory], 0)
        # Whole before it is named, so that a file with a name is never half a segment.
        file.sync()
        disk.rename(young, path)
        file.path = path
        disk.sync_directory(directory)
        on_failure.pop_all()
    return Segment(file, number=number, segment_id=segment_id, shape=shape)


def open_segment(
    disk: Disk, path: Path, number: int, cluster_name: str, geometry: Geometry
) -> "Segment | str":
    """Open a segment file, or return in one word why it is not one of this tier's."""
    file = disk.open(path)
    try:
        memory = aligned(PAGE_BYTES)
        if file.size() >= PAGE_BYTES:
            file.read([memory], 0)
        found = read_header(
            memory.tobytes(), cluster_name=cluster_name, number=number, geometry=geometry
        )
    except BaseException:
        file.close()
        raise
    if isinstance(found, str):
        file.close()
        return found
    segment_id, shape = found
    return Segment(file, number=number, segment_id=segment_id, shape=shape)


def _discard(disk: Disk, file: DiskFile) -> None:
    file.close()
    with contextlib.suppress(TierError):
        disk.remove(file.path)
