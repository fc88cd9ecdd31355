"""Plain data of the NVMe tier: an owner's request, the counts, what goes in and comes out."""

from dataclasses import dataclass

from kvray.errors import ConfigError
from kvray.store.arena.layout import Array, Geometry
from kvray.store.arena.slots import Reservation
from kvray.store.nvme.record import SegmentShape


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """An owner's figures for its NVMe tier; sizes in bytes."""

    cluster_name: str
    capacity: int  # of all segment files together, at most
    segment: int = 2**30
    """Payload of one segment file. Another value puts existing files aside."""
    slot_min: int = 64 * 2**10  # smallest slot; likewise
    free_reserve: int = 0  # of the file system, for others
    io_threads: int = 4  # transfers that one call runs at once
    group: str | None = None  # its members may open the files too; see `Access`

    def geometry(self) -> Geometry:
        """Return the figures of the tables; ConfigError: no segment fits, or sizes do not."""
        one = SegmentShape.of(self._geometry(1), self.slot_min).file_bytes
        geometry = self._geometry(self.capacity // one)
        if not geometry.is_sound:
            raise ConfigError(
                f"nvme.capacity ({self.capacity}) holds no file of nvme.segment ({self.segment}),"
                f" or that is no multiple of arena.slot_min ({self.slot_min}), or this none of"
                " 4096; change one of them."
            )
        return geometry

    def _geometry(self, num_segments: int) -> Geometry:
        return Geometry(
            capacity=num_segments * self.segment,
            slab_bytes=self.segment,
            slot_min=self.slot_min,
            holders_max=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demotion:
    """Blocks of one chain in an arena, and the slots of the store that they go to; one row each."""

    reservation: Reservation
    parents: Array  # key before each block, u64 [num_slots, 4]; zero at a root
    arena_slots: Array  # READY and leased by the caller until `write` ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """Blocks that `read` has brought into an arena's slots, one row a key."""

    sound: Array  # a mask of those that are there and have their checksum
    checksums: Array  # u64, to commit the sound ones


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStats:
    """Counts of a store since it was opened; sizes in bytes."""

    blocks: int
    block_bytes: int  # of the blocks that are here, with the rest of their last page
    segments: int
    file_bytes: int
    segments_without_room: int
    """Segments that the capacity allows and the disk has no room for."""
    stored: int
    evicted: int
    dropped: int
    corrupt: int
    unreadable: int  # blocks that the device refused to read: a miss each time
    written_bytes: int
    read_bytes: int
    is_direct: bool  # whether transfers go past the page cache
