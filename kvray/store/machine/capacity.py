"""Whether an arena fits into mount, cgroups and machine beside Ray; the arithmetic in words.

Cgroups are this process's own and those around it; mounts are those of /proc/self/mountinfo.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from kvray.config import format_size
from kvray.errors import CapacityError

_MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted file system."""

    point: Path
    kind: str
    """Such as "tmpfs" or "hugetlbfs"."""
    device: str
    """Major and minor number, as in "0:23"."""
    root: str
    """The directory of the file system that is seen at `point`."""
    options: tuple[str, ...]
    """Those of the file system, not of this mount of it."""

    @property
    def is_memory(self) -> bool:
        """Whether the file system is kept in memory."""
        return self.kind in ("tmpfs", "hugetlbfs", "ramfs")


def mounts(text: str | None = None) -> list[Mount]:
    """Return the mounts of `text`, or the kernel's; later ones lie over earlier ones."""
    lines = (_MOUNTINFO.read_text() if text is None else text).splitlines()
    return [_parse(line) for line in lines]


def mount_of(path: Path) -> Mount | None:
    """Return the mount that holds the existing `path`; None if the kernel does not list it."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    path = path.resolve()
    holding = [
        mount
        for mount in mounts()
        if mount.device == device and (mount.point == path or mount.point in path.parents)
    ]
    return max(holding, key=lambda mount: len(mount.point.parts), default=None)


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(), after.split(" ", 2)
    return Mount(
        point=Path(_plain(fields[4])),
        kind=kind,
        device=fields[2],
        root=_plain(fields[3]),
        options=tuple(options.split(",")),
    )


def _plain(name: str) -> str:
    """Return a path without the kernel's escapes for blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


_SELF = Path("/proc/self/cgroup")
_UNLIMITED = 2**62
"""Version 1 writes a number near 2^63 where there is no limit."""
_FIGURES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file", "active_file"),
    "cgroup": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    ),
}
"""Version 2, then 1: files of limit and usage; page cache in memory.stat, idle and in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """One cgroup with a memory limit; sizes in bytes."""

    path: Path
    is_root: bool
    """Whether it is the outermost that this process sees: in a container, the container's."""
    limit: int
    usage: int
    idle_cache: int
    active_cache: int

    @property
    def left(self) -> int:
        """Bytes until the limit, for which the kernel gives idle page cache up."""
        return max(0, self.limit - self.usage + self.idle_cache)


def limiting_cgroups(
    membership: str | None = None, listed: list[Mount] | None = None
) -> list[Cgroup]:
    """Return the cgroups with a memory limit that hold this process, the innermost first.

    `membership` is as in /proc/self/cgroup, `listed` are the mounts; None: ask the kernel.
    """
    # Kind of hierarchy -> this process's cgroup in it, if it may count memory.
    own: dict[str, str] = {}
    for line in (_SELF.read_text() if membership is None else membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    return [
        cgroup
        for mount in (mounts() if listed is None else listed)
        if mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options)
        for directory in _upwards(mount, own.get(mount.kind, "/"))
        if (cgroup := _read(mount, directory)) is not None
    ]


def _upwards(mount: Mount, own: str) -> list[Path]:
    """Return the directory of cgroup `own` and those above it, up to the mount."""
    below = PurePosixPath(own)
    if below.is_relative_to(mount.root):
        below = below.relative_to(mount.root)
    elif ".." in below.parts or mount.root != "/":
        below = PurePosixPath()  # outside of what is mounted here
    directory = mount.point / below.relative_to(below.anchor)
    return [directory, *(up for up in directory.parents if up.is_relative_to(mount.point))]


def _read(mount: Mount, directory: Path) -> Cgroup | None:
    """Return a cgroup's figures; None if it has no limit or does not count memory."""
    limit_name, usage_name, idle_name, active_name = _FIGURES[mount.kind]
    try:
        limit = (directory / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return Cgroup(
            path=directory,
            is_root=directory == mount.point,
            limit=int(limit),
            usage=int((directory / usage_name).read_text()),
            idle_cache=int(stat.get(idle_name, 0)),
            active_cache=int(stat.get(active_name, 0)),
        )
    except (OSError, ValueError):
        return None


_SHM = Path("/dev/shm")
_HUGE_POOLS = Path("/sys/kernel/mm/hugepages")
_RAY_BYTES = 768 * 2**20
"""Ray's own processes: 530 MiB on a head without dashboard, 205 MiB on another node."""
_SPARE = 64 * 2**20
"""Left out of the capacity that a refusal names, because the figures change before somebody reads
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaims:
    """Ray's claims on this node's memory."""

    object_store_bytes: int
    """The unused rest of its object store."""
    threshold: float
    """Share of the node's memory above which Ray kills workers, for as long as it is exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRoom:
    """Size and room of a mount, in bytes."""

    point: Path
    size: int
    free: int
    is_shm: bool
    """Whether Ray's object store fills it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePool:
    """The huge pages that the machine has set aside; nobody else can have them."""

    path: Path
    page_bytes: int
    total: int
    left: int
    """Pages, as `total`, that are neither in use nor promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """A node's memory for a file at one place, as of now; sizes in bytes."""

    total: int
    available: int
    cgroups: tuple[Cgroup, ...] = ()
    """Those that limit this process, the innermost first."""
    mount: MountRoom | None = None
    """None: it has no limit of its own."""
    pool: HugePool | None = None
    """None: the mount is no hugetlbfs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One bound on the size of a file in memory."""

    name: str
    limit: int
    left: int
    words: str
    """How `left` comes about; the end of "The arena needs so much, but"."""
    remedy: str = ""
    """Other help than a smaller arena; the end of "lower arena.capacity"."""


def check_room(
    directory: Path,
    file_bytes: int,
    claims: MemoryClaims | None = None,
    *,
    largest: Callable[[int], int],
) -> None:
    """Raise CapacityError, with the arithmetic and the fix, if a file does not fit into memory.

    `claims` are Ray's here; None: there is no Ray. `largest` gives the largest arena.capacity whose
    file fits into so many bytes; 0: none does.
    """
    bounds = rooms(read_memory(directory), file_bytes, claims)
    room = min(bounds, key=lambda room: room.left)
    if file_bytes <= room.left:
        return
    fitting = _rounded_down(largest(room.left - _SPARE))
    # Of two figures that look equal nobody sees which is larger.
    too_much = f" ({format_size(file_bytes - room.left)} too much)"
    needs = _gib(file_bytes) + (too_much if _gib(file_bytes) in room.words else "")
    raise CapacityError(
        f"The arena needs {needs}, but {room.words};"
        f" {f'lower arena.capacity to {fitting}' if fitting else 'free memory'}{room.remedy}."
    )


def read_memory(directory: Path) -> NodeMemory:
    """Return this machine's memory for a file in `directory`."""
    machine, mount = psutil.virtual_memory(), mount_of(directory)
    pool: HugePool | None = None
    if mount is not None and mount.kind == "hugetlbfs":
        page_bytes = os.statvfs(directory).f_frsize
        path = _HUGE_POOLS / f"hugepages-{page_bytes // 1024}kB"
        total, free, promised = (
            int((path / name).read_text())
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
        pool = HugePool(path=path, page_bytes=page_bytes, total=total, left=free - promised)
    return NodeMemory(
        total=machine.total,
        available=machine.available,
        cgroups=tuple(limiting_cgroups()),
        mount=read_mount(directory),
        pool=pool,
    )


def read_mount(directory: Path) -> MountRoom | None:
    """Return the mount of a directory; None if its size has no limit."""
    stat = os.statvfs(directory)
    if not stat.f_blocks:
        return None
    return MountRoom(
        point=directory,
        size=stat.f_blocks * stat.f_frsize,
        free=stat.f_bavail * stat.f_frsize,
        is_shm=_SHM.exists() and os.stat(_SHM).st_dev == os.stat(directory).st_dev,
    )


def rooms(memory: NodeMemory, file_bytes: int, claims: MemoryClaims | None) -> Iterator[Room]:
    """Yield every bound on a file of `file_bytes`, with Ray's object store filled up. Pure."""
    yield from _mount_rooms(memory, file_bytes, claims)
    if memory.pool is None:  # else nobody else can have its pages, whatever memory is full
        yield from _memory_rooms(memory, claims)


def _mount_rooms(
    memory: NodeMemory, file_bytes: int, claims: MemoryClaims | None = None
) -> Iterator[Room]:
    """Yield the bounds of the mount on a file of `file_bytes`. Pure."""
    filling = 0 if claims is None or memory.pool is not None else claims.object_store_bytes
    if (mount := memory.mount) is not None:
        filling = filling if mount.is_shm else 0
        command = f" (`{remount_command(mount, file_bytes + filling)}`)"
        yield Room(
            name=str(mount.point),
            limit=mount.size,
            left=mount.free - filling,
            words=f"{_gib(mount.free)} are free in {mount.point}{_less(filling)}",
            remedy=" or enlarge the mount" + ("" if memory.pool is not None else command),
        )
    if (pool := memory.pool) is not None:
        left = pool.left * pool.page_bytes
        wanted = pool.total - pool.left + -(-file_bytes // pool.page_bytes)
        yield Room(
            name="huge pages",
            limit=pool.total * pool.page_bytes,
            left=left,
            words=f"{_gib(left)} are left of the machine's huge pages",
            remedy=f" or run `echo {wanted} > {pool.path}/nr_hugepages`",
        )


def _memory_rooms(memory: NodeMemory, claims: MemoryClaims | None) -> Iterator[Room]:
    """Yield the bounds on all memory, of mounts and of processes. Pure."""
    filling = 0 if claims is None else claims.object_store_bytes
    for cgroup in memory.cgroups:
        yield Room(
            name=f"cgroup {cgroup.path}",
            limit=cgroup.limit,
            left=cgroup.left - filling,
            words=f"the cgroup {cgroup.path} leaves {_gib(cgroup.left)} of its limit of"
            f" {_gib(cgroup.limit)}{_less(filling)}",
            remedy=" or raise that limit",
        )
    yield Room(
        name="machine",
        limit=memory.total,
        left=memory.available - filling,
        words=f"{_gib(memory.available)} of the machine's {_gib(memory.total)} are"
        f" available{_less(filling)}",
    )
    if claims is not None:
        yield _under_threshold(memory, claims)


def worker_bytes(memory: NodeMemory, file_bytes: int, claims: MemoryClaims) -> int:
    """Return what is left for Ray's workers beside a file and the object store, in MiB. Pure."""
    in_memory = 0 if memory.pool is not None else file_bytes
    least = min(room.left for room in _memory_rooms(memory, claims))
    return max(0, least - in_memory - _RAY_BYTES) >> 20 << 20


def remount_command(mount: MountRoom, needed: int) -> str:
    """Return root's command that gives a mount room for `needed` more bytes."""
    gib = -(-(mount.size - mount.free + needed) // 2**30)
    return f"mount -o remount,size={gib}g {mount.point}"


def _rounded_down(size: int) -> str:
    """Return `size` as a setting that is not larger; "" for nothing."""
    if size >= 2**30:
        return f"{size * 10 // 2**30 / 10:.1f}GiB"
    return f"{size // 2**20}MiB" if size >= 2**20 else ""


def _under_threshold(memory: NodeMemory, claims: MemoryClaims) -> Room:
    """Return the memory that may come into use before Ray's memory monitor kills.

    Like the monitor, it takes a container's limit for the node's memory, and counts tmpfs as used.
    """
    total, used = memory.total, memory.total - memory.available
    for cgroup in memory.cgroups:
        if cgroup.is_root and cgroup.limit <= total:
            total = cgroup.limit
            used = max(0, cgroup.usage - cgroup.idle_cache - cgroup.active_cache)
    allowed = int(claims.threshold * total)
    return Room(
        name=f"Ray's threshold, {claims.threshold:g} x {_gib(total)}",
        limit=allowed,
        left=allowed - used - claims.object_store_bytes,
        words=f"Ray kills workers above {claims.threshold:g} x {_gib(total)} = {_gib(allowed)}, of"
        f" which {_gib(used)} are in use{_less(claims.object_store_bytes)}",
        remedy=", give Ray a smaller object store or raise RAY_memory_usage_threshold",
    )


def _less(filling: int) -> str:
    return f", less {_gib(filling)} that Ray's object store may still take" if filling else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}GiB"
