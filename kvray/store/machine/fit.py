"""Shares a node's memory out between an arena, Ray and others, and says how to make it fit. Pure.

An arena is checked against the same bounds when it is made (`capacity`). A plan keeps within all of
them with Ray's object store full and its workers as large as Ray was told.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvray.store.machine.capacity import (
    HugePool,
    MemoryClaims,
    MountRoom,
    NodeMemory,
    Room,
    memory_rooms,
    mount_rooms,
)

_MIB = 2**20
_GIB = 2**30
OBJECT_STORE_MIN = 80 * _MIB
"""The least that is asked of Ray, which refuses less than 75 MiB."""
RAY_BYTES = 768 * _MIB
"""Ray's own processes: 530 MiB on a head without dashboard, 205 MiB on another node."""
_OBJECT_STORE_ENOUGH = _GIB
"""A smaller object store is offered only where memory has no more."""
_OBJECT_STORE_SHARE = 0.3
"""Ray's own proportion of available memory."""
_OBJECT_STORE_MAX = 200 * 10**9
"""Ray's own."""
_THRESHOLD_MAX = 0.98
"""Above it nothing is left for the kernel when workers grow sooner than Ray looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The requested memory; sizes in bytes."""

    arena_bytes: int
    """The arena's whole file, tables included."""
    heap_bytes: int
    """Minimum for Ray's workers, engines among them."""
    object_store_bytes: int | None = None
    """None: as Ray takes by itself, or less."""
    threshold: float = 0.95
    """Share of memory above which Ray kills workers; raised only where nothing else helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One bound, and its parts; sizes in bytes."""

    name: str
    limit: int
    used: int
    """By all others, now."""
    ray: int = 0
    """Ray's own processes."""
    arena: int = 0
    object_store: int = 0
    heap: int = 0

    @classmethod
    def of(cls, room: Room, **parts: int) -> "Share":
        """Return the share of these parts in `room`."""
        return cls(name=room.name, limit=room.limit, used=room.limit - room.left, **parts)

    @property
    def left(self) -> int:
        """The rest; below 0 it does not fit."""
        taken = self.used + self.ray + self.arena + self.object_store + self.heap
        return self.limit - taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The settings of Ray and the machine; sizes in bytes."""

    arena_bytes: int
    object_store_bytes: int
    heap_bytes: int
    """All that workers may have; at least the request if it fits."""
    threshold: float
    remounts: tuple[MountRoom, ...]
    """Mounts that are too small, with the size that they need."""
    pool: HugePool | None
    """Huge pages with the number that is needed, where there are too few."""
    short_by: int
    """Bytes missing with the smallest object store; 0: it fits."""
    shares: tuple[Share, ...]

    @property
    def fits(self) -> bool:
        """Whether there is room for all, once Ray and the mounts are as told."""
        return self.short_by == 0


def plan(memory: NodeMemory, shm: MountRoom | None, request: MemoryRequest) -> Fit:
    """Share a node's memory out for `request`.

    `memory` is the node's, for a file at the arena's place, without that arena. `shm` is /dev/shm,
    where Ray puts its object store; None: it has no limit.
    """
    arena = _arena_memory(memory, request.arena_bytes)
    most = max(request.threshold, _THRESHOLD_MAX)
    store_min = request.object_store_bytes or min(_OBJECT_STORE_ENOUGH, _rays_own(memory, shm))
    spare = left(memory, most) - arena - request.heap_bytes
    if request.object_store_bytes is None and store_min > spare:
        store_min = OBJECT_STORE_MIN
    least = arena + store_min + request.heap_bytes
    # The least change first.
    higher = (percent / 100 for percent in range(1, 99) if percent / 100 > request.threshold)
    thresholds = (request.threshold, *higher)
    threshold = next((one for one in thresholds if left(memory, one) >= least), most)
    free = left(memory, threshold)
    store = request.object_store_bytes or _object_store(
        memory, shm, request, free - arena, store_min
    )
    heap = max(request.heap_bytes, _down(free - arena - store))
    remounts = tuple(filter(None, _remounts(memory, shm, request.arena_bytes, store)))
    made = Fit(
        arena_bytes=request.arena_bytes,
        object_store_bytes=store,
        heap_bytes=heap,
        threshold=threshold,
        remounts=remounts,
        pool=_pool(memory.pool, request.arena_bytes),
        short_by=max(0, least - free, request.arena_bytes - _mountable(memory)),
        shares=(),
    )
    return replace(made, shares=tuple(_shares(memory, shm, made)))


def largest_arena(memory: NodeMemory, request: MemoryRequest) -> int:
    """Return the largest arena file that fits with this request, mounts enlarged; 0: none."""
    store = request.object_store_bytes or OBJECT_STORE_MIN
    threshold = max(request.threshold, _THRESHOLD_MAX)
    room = left(memory, threshold) - store - request.heap_bytes
    if room <= 0:
        return 0
    if memory.pool is not None:
        page = memory.pool.page_bytes
        room = memory.pool.left * page + room // page * page
    return min(room, _mountable(memory))


def left(memory: NodeMemory, threshold: float) -> int:
    """Return the bytes of memory that arena, object store and workers may take together."""
    claims = MemoryClaims(object_store_bytes=0, threshold=threshold)
    return min(room.left for room in memory_rooms(memory, claims)) - RAY_BYTES


def _arena_memory(memory: NodeMemory, arena_bytes: int) -> int:
    """Return the bytes of free memory that the arena takes.

    Huge pages were set aside before: only missing ones count.
    """
    if memory.pool is None:
        return arena_bytes
    missing = -(-arena_bytes // memory.pool.page_bytes) - memory.pool.left
    return max(0, missing) * memory.pool.page_bytes


def _mountable(memory: NodeMemory) -> int:
    """Return the largest file that the mount can be made to take; hugetlbfs cannot be resized."""
    if memory.pool is None or memory.mount is None:
        return sys.maxsize
    return memory.mount.free


def _rays_own(memory: NodeMemory, shm: MountRoom | None) -> int:
    """Return the object store that Ray makes by default."""
    most = _OBJECT_STORE_MAX
    if shm is not None:
        most = min(most, max(10 * 10**9, int(0.95 * shm.free)))
    available = min(memory.available, *(one.left for one in memory.cgroups), memory.total)
    return max(OBJECT_STORE_MIN, _down(min(most, int(_OBJECT_STORE_SHARE * available))))


def _object_store(
    memory: NodeMemory, shm: MountRoom | None, request: MemoryRequest, free: int, least: int
) -> int:
    """Return the object store that leaves workers their part of the arena's rest.

    It shrinks before /dev/shm must grow, but stays large enough.
    """
    size = min(_rays_own(memory, shm), _down(int(_OBJECT_STORE_SHARE * free)))
    size = max(least, min(size, _down(free - request.heap_bytes)))
    if shm is None:
        return size
    in_shm = request.arena_bytes if memory.mount is not None and memory.mount.is_shm else 0
    has_room = _down(shm.free - in_shm)
    return min(size, has_room) if has_room >= least else size


def _remounts(
    memory: NodeMemory, shm: MountRoom | None, arena: int, store: int
) -> Iterator[MountRoom | None]:
    """Yield the mounts that are too small, with their new sizes."""
    mount = memory.mount
    with_shm = mount is not None and mount.is_shm
    if shm is not None:
        yield enlarged(shm, store + (arena if with_shm else 0))
    if mount is not None and not with_shm and memory.pool is None:
        yield enlarged(mount, arena)


def enlarged(mount: MountRoom, needed: int) -> MountRoom | None:
    """Return a mount with its size for `needed` more bytes; None if it has room for them."""
    if needed <= mount.free:
        return None
    size = _up(mount.size - mount.free + needed)
    return replace(mount, size=size, free=size - (mount.size - mount.free))


def remount_command(mount: MountRoom) -> str:
    """Return root's command that gives a mount its size."""
    return f"mount -o remount,size={mount.size >> 20}m {mount.point}"


def _pool(pool: HugePool | None, arena_bytes: int) -> HugePool | None:
    if pool is None:
        return None
    more = -(-arena_bytes // pool.page_bytes) - pool.left
    return replace(pool, total=pool.total + more, left=pool.left + more) if more > 0 else None


def _shares(memory: NodeMemory, shm: MountRoom | None, fit: Fit) -> Iterator[Share]:
    """Yield every bound with its shares; mounts as they are now."""
    claims = MemoryClaims(object_store_bytes=0, threshold=fit.threshold)
    store, with_shm = fit.object_store_bytes, memory.mount is not None and memory.mount.is_shm
    arena = _arena_memory(memory, fit.arena_bytes)
    for room in memory_rooms(memory, claims):
        yield Share.of(room, ray=RAY_BYTES, arena=arena, object_store=store, heap=fit.heap_bytes)
    if shm is not None:
        used = shm.size - shm.free
        own = fit.arena_bytes if with_shm else 0
        yield Share(name=str(shm.point), limit=shm.size, used=used, arena=own, object_store=store)
    if not with_shm:
        for room in mount_rooms(memory, fit.arena_bytes):
            yield Share.of(room, arena=fit.arena_bytes)


def _down(size: int) -> int:
    return max(0, size) // _MIB * _MIB


def _up(size: int) -> int:
    return -(-size // _GIB) * _GIB


def commands(fit: Fit, start: Callable[[str], str]) -> list[str]:
    """Return the commands for the node, in order; all but the last are for root.

    `fit` must fit; `start` makes the `ray start` line of its options.
    """
    lines = [remount_command(one) for one in fit.remounts]
    if fit.pool is not None:
        lines.append(f"echo {fit.pool.total} > {fit.pool.path}/nr_hugepages")
    options = f"--object-store-memory={fit.object_store_bytes} --memory={fit.heap_bytes}"
    return [*lines, start(options)]
