"""The segment files of a store, one a slab: made as blocks need them, within budget and room.

An empty file stays: its room is the tier's anyway, and to write into it again is cheaper than into
a new one. It goes when its slab must serve another block size.
"""

from pathlib import Path

import numpy as np

from kvray.errors import CapacityError
from kvray.store.arena.layout import Array, Geometry
from kvray.store.nvme.disk import Disk
from kvray.store.nvme.record import SegmentShape
from kvray.store.nvme.segment import Segment, create_segment


class SegmentFiles:
    """The open files, by slab; only the one thread that writes changes them."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        *,
        cluster_name: str,
        geometry: Geometry,
        free_reserve: int,
        found: list[Segment],
        next_number: int,
    ) -> None:
        """Own the segments `found`, segment i in slab i.

        `free_reserve` bytes of the file system stay free. `next_number` is above that of every
        file.
        """
        self.by_slab = dict(enumerate(found))
        self._disk = disk
        self._directory = directory
        self._cluster_name = cluster_name
        self._geometry = geometry
        self._free_reserve = free_reserve
        self._next_number = next_number

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.shape.file_bytes for one in list(self.by_slab.values()))

    def serves(self, slab: int, block_bytes: int) -> bool:
        """Whether a slab has a file for blocks of that size."""
        segment = self.by_slab.get(slab)
        return segment is not None and segment.shape.block_bytes == block_bytes

    def replace(self, slab: int, block_bytes: int) -> None:
        """Give a slab, which nobody uses, a new file for blocks of that size.

        Raises:
            CapacityError: there is no room for it; the slab has no file then.
            TierError: the device failed; likewise.
        """
        old = self.by_slab.pop(slab, None)
        if old is not None:
            old.close()
            self._disk.remove(old.file.path)
            # Gone for good before there is another: with one file too many the next start would
            # have to choose, and the old one's records still name blocks.
            self._disk.sync_directory(self._directory)
        shape = SegmentShape.of(self._geometry, block_bytes)
        if not self._has_room(shape.file_bytes):
            raise CapacityError(
                f"A segment file of {shape.file_bytes} bytes in {self._directory} would leave less"
                f" than the {self._free_reserve} bytes that are to stay free; free room on its"
                " file system, or lower nvme.free_reserve."
            )
        number = self._next_number
        self._next_number += 1
        self.by_slab[slab] = create_segment(
            self._disk,
            self._directory,
            number=number,
            cluster_name=self._cluster_name,
            shape=shape,
        )

    def has_room_for_one(self) -> bool:
        """Whether the largest possible file leaves the reserve free."""
        shape = SegmentShape.of(self._geometry, self._geometry.slot_min)
        return self._has_room(shape.file_bytes)

    def mask(self, num_slabs: int) -> Array:
        """Return a mask of the slabs that have a file."""
        has_file = np.zeros(num_slabs, dtype=bool)
        has_file[list(self.by_slab)] = True
        return has_file

    def close(self) -> None:
        """Close all files. Twice is fine."""
        for one in self.by_slab.values():
            one.close()

    def _has_room(self, file_bytes: int) -> bool:
        return self._disk.free_bytes(self._directory) >= file_bytes + self._free_reserve
