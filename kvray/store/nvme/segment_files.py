"""The segment files of a store, one a slab: made as blocks need them, within budget and room.

A file is complete before it has its name, and opened only if it is this tier's. An empty file
stays: its room is the tier's anyway, and to write into it again is cheaper than into a new one. It
goes when its slab must serve another block size.
"""

import contextlib
import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvray.errors import CapacityError, TierError
from kvray.store.arena.layout import Array, Geometry
from kvray.store.arena.payload import runs
from kvray.store.nvme.disk import Disk, DiskFile, aligned, device_errors
from kvray.store.nvme.record import (
    PAGE_BYTES,
    RECORD,
    RECORDS_PER_PAGE,
    SegmentShape,
    is_valid,
    make_header,
    read_header,
    seal,
)
from kvray.store.nvme.terms import NvmeSpec

_log = logging.getLogger("kvray.nvme")


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
        shape, cluster_name=cluster_name, segment_id=segment_id, number=number, created=time.time()
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
    with contextlib.ExitStack() as unless_ours:
        file = disk.open(path)
        unless_ours.callback(file.close)
        memory = aligned(PAGE_BYTES)
        if file.size() >= PAGE_BYTES:
            file.read([memory], 0)
        found = read_header(
            memory.tobytes(), cluster_name=cluster_name, number=number, geometry=geometry
        )
        if isinstance(found, str):
            return found
        unless_ours.pop_all()
    segment_id, shape = found
    return Segment(file, number=number, segment_id=segment_id, shape=shape)


def _discard(disk: Disk, file: DiskFile) -> None:
    file.close()
    with contextlib.suppress(TierError):
        disk.remove(file.path)


class SegmentFiles:
    """The open files, by slab; only the one thread that writes changes them."""

    def __init__(self, disk: Disk, directory: Path, spec: NvmeSpec) -> None:
        """Open the segment files in `directory` that this tier can use, and clear the others away.

        Segment i goes to slab i. A file of another tier, version or geometry, or with a damaged
        header, is renamed and never removed: it may be somebody's. Unfinished files are removed.
        """
        self.by_slab: dict[int, Segment] = {}
        self.surplus: tuple[str, ...] = ()
        """Files, unused longest, that a lowered capacity removed."""
        self.aside: tuple[str, ...] = ()
        """Files that are not this tier's, renamed with the reason behind their name."""
        self._disk = disk
        self._directory = directory
        self._spec = spec
        self._geometry = spec.geometry()
        self._next_number = 0  # above that of every file
        try:
            self._open_existing()
        except BaseException:
            self.close()
            raise

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.shape.file_bytes for one in self.by_slab.copy().values())

    def serves(self, slab: int, block_bytes: int) -> bool:
        """Whether a slab has a file for blocks of that size."""
        segment = self.by_slab.get(slab)
        return segment is not None and segment.shape.block_bytes == block_bytes

    def replace(self, slab: int, block_bytes: int) -> None:
        """Give a slab, which nobody uses, a new file for blocks of that size.

        CapacityError: there is no room for it; the slab has no file then.
        """
        old = self.by_slab.pop(slab, None)
        if old is not None:
            old.file.close()
            self._disk.remove(old.file.path)
            # Gone for good before there is another: with one file too many the next start would
            # have to choose, and the old one's records still name blocks.
            self._disk.sync_directory(self._directory)
        shape = SegmentShape.of(self._geometry, block_bytes)
        if not self._has_room(shape.file_bytes):
            raise CapacityError(
                f"A segment file of {shape.file_bytes} bytes in {self._directory} would leave less"
                f" than the {self._spec.free_reserve} bytes that are to stay free; free room on its"
                " file system, or lower nvme.free_reserve."
            )
        number = self._next_number
        self._next_number += 1
        self.by_slab[slab] = create_segment(
            self._disk, self._directory, number, self._spec.cluster_name, shape
        )

    def has_room_for_one(self) -> bool:
        """Whether the largest possible file leaves the reserve free."""
        shape = SegmentShape.of(self._geometry, self._geometry.slot_min)
        return self._has_room(shape.file_bytes)

    def mask(self) -> Array:
        """Return a mask of the slabs that have a file."""
        has_file = np.zeros(self._geometry.num_slabs, dtype=bool)
        has_file[list(self.by_slab)] = True
        return has_file

    def close(self) -> None:
        """Close all files. Twice is fine."""
        for one in self.by_slab.values():
            one.file.close()

    def _open_existing(self) -> None:
        with device_errors(self._directory, "listed"):
            paths = sorted(self._directory.iterdir())
        aside = []
        for path in paths:
            if path.suffix == _UNFINISHED and number_of(path.with_suffix("")) is not None:
                self._disk.remove(path)
            if (number := number_of(path)) is None:
                continue
            self._next_number = max(self._next_number, number + 1)
            opened = open_segment(self._disk, path, number, self._spec.cluster_name, self._geometry)
            if isinstance(opened, Segment):
                self.by_slab[len(self.by_slab)] = opened
            else:
                aside.append(_put_aside(self._disk, path, opened))
        self.aside = tuple(aside)
        self._drop_surplus()
        if self.aside or self.surplus:
            self._disk.sync_directory(self._directory)

    def _drop_surplus(self) -> None:
        """Remove the segments beyond a lowered capacity."""
        most = self._geometry.num_slabs
        if len(self.by_slab) <= most:
            return
        by_use = sorted(self.by_slab.values(), key=_last_use, reverse=True)
        kept, surplus = sorted(by_use[:most], key=lambda one: one.number), by_use[most:]
        for segment in surplus:
            segment.file.close()
            self._disk.remove(segment.file.path)
            _log.warning("%s is removed: nvme.capacity was lowered", segment.file.path)
        self.by_slab = dict(enumerate(kept))
        self.surplus = tuple(segment.file.path.name for segment in surplus)

    def _has_room(self, file_bytes: int) -> bool:
        return self._disk.free_bytes(self._directory) >= file_bytes + self._spec.free_reserve


def _put_aside(disk: Disk, path: Path, reason: str) -> str:
    target = path.with_name(f"{path.name}.{reason}")
    attempt = 1
    while target.exists():
        attempt += 1
        target = path.with_name(f"{path.name}.{reason}-{attempt}")
    disk.rename(path, target)
    _log.warning(
        "%s is no segment that this tier can use (%s): it is left as %s, which you may delete",
        path,
        reason,
        target.name,
    )
    return target.name


def _last_use(segment: Segment) -> int:
    records = aligned(segment.shape.table_bytes).view(RECORD)
    segment.read_table(records)
    valid = is_valid(records, segment_id=segment.segment_id, first_row=0)
    return int(records["used"][valid].max(initial=0))
