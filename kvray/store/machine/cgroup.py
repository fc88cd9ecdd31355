"""The memory that this process's cgroups leave: its own, and those around it."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvray.store.machine.mounts import Mount, mounts

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
    own = _own_paths(_SELF.read_text() if membership is None else membership)
    return [
        cgroup
        for mount in (mounts() if listed is None else listed)
        if mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options)
        for directory in _upwards(mount, own.get(mount.kind, "/"))
        if (cgroup := _read(mount, directory)) is not None
    ]


def _own_paths(membership: str) -> dict[str, str]:
    """Return kind of hierarchy -> this process's cgroup in it, if it may count memory."""
    paths = {}
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    return paths


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
