"""The file of an arena: complete before it gets its name, checked before it is mapped."""

import bisect
import mmap
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvray.config import KVRayConfig
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store.arena.layout import (
    ALIGNMENT,
    FORMAT_VERSION,
    HEADER,
    LIVE,
    MAGIC,
    Geometry,
    align,
    header_checksum,
)
from kvray.store.arena.prefault import (
    CHUNK_BYTES,
    Progress,
    ask_for_huge_pages,
    mapping_of,
    pieces_of,
    populate,
    rows_of,
)
from kvray.store.arena.tables import Array, Tables
from kvray.store.machine.access import reason
from kvray.store.machine.capacity import MemoryClaims, check_room, mount_of
from kvray.store.machine.pages import spread
from kvray.store.machine.side_file import SideFile

ARENA_FILE = "arena"
_ARENA_ID = re.compile(rb"[0-9a-f]{16}")
_FIGURES = ("capacity", "slab_bytes", "slot_min", "holders_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpec:
    """An owner's figures for a new arena; sizes in bytes."""

    cluster_name: str
    """Of at most 64 bytes: the configuration takes half as many."""
    capacity: int
    slab: int
    slot_min: int
    holders_max: int
    interleave: bool = True
    """Over the NUMA nodes; else all memory comes from the node of the thread that makes it."""
    claims: MemoryClaims | None = None
    """Ray's claims on the same memory; None: there is no Ray."""
    beside: int = 0
    """Bytes of other files that the same mount must have room for."""
    in_memory: bool = False
    """Whether it must be on a mount that is memory."""

    @classmethod
    def of(cls, config: KVRayConfig, claims: MemoryClaims | None = None) -> "ArenaSpec":
        """Return the spec of a node's arena in a configuration."""
        arena = config.arena
        return cls(
            cluster_name=config.cluster_name,
            capacity=arena.capacity,
            slab=arena.slab,
            slot_min=arena.slot_min,
            holders_max=arena.holders_max,
            interleave=arena.numa == "interleave",
            claims=claims,
            beside=config.events_bytes,
            in_memory=arena.mount == "memory",
        )

    def geometry(self) -> Geometry:
        """Return the figures for at most `capacity` bytes; CapacityError: no slot fits.

        Small arenas get smaller slabs, so that at least four block sizes can share one.
        """
        slot_min = align(self.slot_min)
        slab = max(slot_min, min(self.slab, self.capacity // 4)) // slot_min * slot_min
        if self.capacity < slab:
            raise CapacityError(
                f"An arena of {self.capacity} bytes holds no slot of {slot_min}; raise"
                " arena.capacity."
            )
        return Geometry(
            capacity=self.capacity // slab * slab,
            slab_bytes=slab,
            slot_min=slot_min,
            holders_max=self.holders_max,
        )

    def largest_capacity(self, file_bytes: int) -> int:
        """Return the largest capacity, in MiB, whose file has at most `file_bytes`; 0: none."""

        def size(mib: int) -> int:
            asked = replace(self, capacity=mib << 20)
            return asked.geometry().file_bytes if asked.capacity >= self.slot_min else 0

        mib = bisect.bisect(range((max(0, file_bytes) >> 20) + 1), max(0, file_bytes), key=size) - 1
        return mib << 20 if mib << 20 >= self.slot_min else 0


def lock_path(directory: Path, arena_id: str) -> Path:
    """Return the side file of an arena: one name belongs to one inode for ever."""
    return directory / f"lock.{arena_id}"


def require_room(directory: Path, spec: ArenaSpec) -> None:
    """Make sure that an arena of `spec` fits at `directory`; raises as `check_room`.

    ConfigError: it must be in memory, and the mount is none.
    """
    mount = mount_of(directory)
    if spec.in_memory and mount is not None and not mount.is_memory:
        raise ConfigError(
            f"{directory} is on {mount.kind}, which is no memory; set arena.dir to a tmpfs, such as"
            " /dev/shm, or to a hugetlbfs mount, or for a trial arena.mount to any."
        )
    page = _page_bytes(directory)
    check_room(
        directory,
        needed_bytes(directory, spec),
        spec.claims,
        largest=lambda room: spec.largest_capacity((room - spec.beside) // page * page),
    )


def needed_bytes(directory: Path, spec: ArenaSpec) -> int:
    """Return the memory that an arena of `spec` takes at `directory`."""
    return align(spec.geometry().file_bytes, _page_bytes(directory)) + spec.beside


def create_file(directory: Path, spec: ArenaSpec, progress: Progress) -> None:
    """Make and prefault an arena in `directory`, in place of the one that has its name.

    Raises:
        CapacityError: it does not fit into the mount, the cgroup or the memory.
        ConfigError: the directory cannot be used.
    """
    arena_id = secrets.token_hex(8)
    path = directory / f"{ARENA_FILE}.{arena_id}.new"
    side = lock_path(directory, arena_id)
    complete = False
    try:
        for stale in directory.glob(f"{ARENA_FILE}.*.new"):
            stale.unlink(missing_ok=True)  # of an owner that died while it made one
        require_room(directory, spec)
        _build(path, spec, arena_id, progress)
        SideFile.at(side)
        os.rename(path, directory / ARENA_FILE)
        complete = True
    except OSError as error:
        raise ConfigError(f"No arena can be made in {directory} {reason(error)}") from None
    finally:
        if not complete:
            path.unlink(missing_ok=True)
            side.unlink(missing_ok=True)


def map_file(path: Path) -> Tables:
    """Map an arena if this code understands its header.

    ShardUnavailable: there is none, or it is of another format, or not whole.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise ShardUnavailable(
            f"User {os.geteuid()} may not open the arena {path}; run engine and tier as one user,"
            " or set arena.group to a group of both, the same for both."
        ) from None
    except OSError as error:
        raise ShardUnavailable(
            f"There is no arena at {path} ({error.strerror}); start the tier with `kvray up`."
        ) from None
    try:
        geometry = _check_header(path, os.pread(fd, HEADER.itemsize, 0))
        size, expected = os.fstat(fd).st_size, align(geometry.file_bytes, _page_bytes(path))
        if size != expected:
            raise ShardUnavailable(
                f"{path} has {size} bytes instead of {expected}; restart the tier."
            )
        tables = Tables(mmap.mmap(fd, size), geometry)
        ask_for_huge_pages(mapping_of(tables))
        return tables
    except OSError as error:
        raise ShardUnavailable(f"{path} cannot be mapped ({error.strerror}).") from None
    finally:
        os.close(fd)


def give_rows_memory(path: Path, tables: Tables, rows: range) -> None:
    """Give the slot rows `rows` of the arena at `path` their memory.

    CapacityError: mount or memory have no more.
    """
    pieces = rows_of(tables, rows)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _give_memory(fd, mapping_of(tables), pieces, lambda done, total: None)
        finally:
            os.close(fd)
    except OSError as error:
        raise CapacityError(
            f"The tables of the arena in {path.parent} need {sum(map(len, pieces))} bytes more for"
            f" blocks of a smaller size, and cannot have them ({error.strerror}); these blocks are"
            " not stored. Lower arena.capacity, or raise arena.slot_min, and restart the tier."
        ) from None


def holds_arena(path: Path, arena_id: str) -> bool | None:
    """Return whether the file at `path` is the arena of that id; None: it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:  # a buffer is as large as a huge page
            head = file.read(HEADER.itemsize)
    except OSError:
        return None
    if len(head) < HEADER.itemsize:
        return False
    return bytes(np.frombuffer(head, HEADER)[0]["arena_id"]) == arena_id.encode()


def _check_header(path: Path, head: bytes) -> Geometry:
    if len(head) < HEADER.itemsize:
        raise ShardUnavailable(f"{path} is too short to be an arena; restart the tier.")
    header = np.frombuffer(head, HEADER)[0]
    if header["magic"] != MAGIC:
        raise ShardUnavailable(f"{path} is no arena, or was never finished; restart the tier.")
    version = int(header["format_version"])
    if version != FORMAT_VERSION:
        raise ShardUnavailable(
            f"{path} is an arena of format {version}, not {FORMAT_VERSION}; restart the tier with"
            " the same kvray version as the engine."
        )
    if int(header["checksum"]) != header_checksum(head):
        raise ShardUnavailable(f"{path} has a damaged header; restart the tier.")
    geometry = Geometry(**{name: int(header[name]) for name in _FIGURES})
    # The id becomes a part of a path.
    if not geometry.is_valid or not _ARENA_ID.fullmatch(header["arena_id"]):
        raise ShardUnavailable(f"{path} has a damaged header; restart the tier.")
    return geometry


def _build(path: Path, spec: ArenaSpec, arena_id: str, progress: Progress) -> None:
    """Write a complete arena file: its memory allocated and touched, its header last."""
    geometry = spec.geometry()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        total = align(geometry.file_bytes, _page_bytes(path))
        os.ftruncate(fd, total)
        tables = Tables(mmap.mmap(fd, total), geometry)
        memory = mapping_of(tables)
        ask_for_huge_pages(memory)
        if spec.interleave:
            spread(memory)
        if _page_bytes(path) == ALIGNMENT:  # a huge page holds rows of both kinds
            tables.counts.missing_rows = geometry.num_slots - geometry.first_rows
        # A full mount must be an error here, not a SIGBUS in some copy.
        _give_memory(fd, memory, pieces_of(tables), progress)
    except OSError as error:
        raise CapacityError(
            f"The arena's {geometry.file_bytes} bytes could not be had in {path.parent}"
            f" ({error.strerror}); lower arena.capacity."
        ) from None
    finally:
        os.close(fd)
    header = tables.header
    header["format_version"] = FORMAT_VERSION
    header["state"] = LIVE
    header["cluster_name"] = spec.cluster_name.encode()
    header["arena_id"] = arena_id.encode()
    for name in _FIGURES:
        header[name] = getattr(geometry, name)
    header["created"] = time.time()
    header["magic"] = MAGIC
    header["checksum"] = header_checksum(header.tobytes())


def _give_memory(fd: int, memory: Array, pieces: Sequence[Array], progress: Progress) -> None:
    """Give these pieces of the file, mapped at `memory`, all of their pages; OSError: it cannot."""
    if populate(*pieces, progress=progress):
        return
    # The kernel cannot populate a mapping.
    done, total = 0, sum(piece.nbytes for piece in pieces)
    for piece in pieces:
        at = piece.ctypes.data - memory.ctypes.data
        for start in range(at, at + piece.nbytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, at + piece.nbytes - start)
            os.posix_fallocate(fd, start, length)
            done += length
            progress(done, total)


def _page_bytes(path: Path) -> int:
    """Return the page size of the file system: on hugetlbfs, a huge page."""
    return os.statvfs(path).f_bsize
