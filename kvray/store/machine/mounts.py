"""The mounts that this process sees, as /proc/self/mountinfo lists them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
