"""Does an arena fit? What the mount, the cgroup and the machine leave, and the arithmetic."""

import os
from pathlib import Path

from kvray.errors import CapacityError

_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Version 2, then 1: directory, file of the limit, file of the usage, reclaimable part of it."""


def check_room(directory: Path, file_bytes: int) -> None:
    """Make sure that a file of `file_bytes` can be held in memory at `directory`.

    Raises:
        CapacityError: it does not fit; the message has the figures and the fix.
    """
    stat = os.statvfs(directory)
    room = {
        f"free in {directory}": stat.f_bavail * stat.f_frsize,
        "left by the cgroup": _cgroup_room(),
        "available memory": _available_memory(),
    }
    for what, size in room.items():
        if size is not None and file_bytes > size:
            raise CapacityError(
                f"The arena needs {_gib(file_bytes)} but {what} is {_gib(size)}; lower"
                f" arena.capacity below {_gib(size)}"
                + (" or enlarge the mount." if what.startswith("free") else ".")
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}GiB"


def _cgroup_room() -> int | None:
    """Return what the cgroup leaves; the page cache, which the kernel gives up, counts as free."""
    for directory, limit_name, usage_name, cache_name in _CGROUPS:
        try:
            limit = (directory / limit_name).read_text().strip()
            usage = int((directory / usage_name).read_text())
            cache = _stat_figure((directory / "memory.stat").read_text(), cache_name)
        except (OSError, ValueError):
            continue
        return None if limit == "max" else max(0, int(limit) - usage + cache)
    return None


def _stat_figure(text: str, name: str) -> int:
    figures = dict(line.split() for line in text.splitlines())
    return int(figures.get(name, 0))


def _available_memory() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
