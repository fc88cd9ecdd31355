"""Does an arena fit? What the mount, the cgroup and the machine leave, and the arithmetic."""

import os
from pathlib import Path

from kvray.errors import CapacityError

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


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
    for limit_path, usage_path in _CGROUP_FILES:
        try:
            limit = Path(limit_path).read_text().strip()
            usage = int(Path(usage_path).read_text())
        except (OSError, ValueError):
            continue
        return None if limit == "max" else max(0, int(limit) - usage)
    return None


def _available_memory() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
