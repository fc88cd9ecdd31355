"""The memory of an arena: its page sizes, its nodes, and the command that gets larger pages.

The figures are those of this process's mapping, which it must have populated: the kernel reports
huge pages only where they are mapped.
"""

import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvray.store.machine import numa
from kvray.store.machine.capacity import mount_of

_SMAPS = Path("/proc/self/smaps")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_LOOK_S = 2.0
_AREA = r"^([0-9a-f]+)-\S+ \S+ \S+ \S+ \d+ +{name}\n((?:\w+:.*\n)*)"
"""A mapping of a file in smaps: its address, and the lines of its figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """The kernel's figures of one mapping of a file; sizes in bytes."""

    address: int
    mapped_bytes: int
    """Of the pages that this process has mapped."""
    huge_bytes: int
    """Of these, in huge pages."""
    huge_page_bytes: int
    """Size of a huge page here; 0: there are none."""


class ArenaPages:
    """The memory of the arena at `path`, as far as this process has mapped it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {}
        self._inode = 0
        self._look_at = 0.0

    def figures(self) -> dict[str, Any]:
        """Return sizes, NUMA nodes, and the command that gets larger pages; {} if not mapped.

        The kernel walks over every page for these, so they are kept once all is mapped.
        """
        try:
            stat = os.stat(self._path)
        except OSError:
            return {}
        is_known = stat.st_ino == self._inode and (
            self._figures.get("mapped_bytes", 0) >= stat.st_size or time.monotonic() < self._look_at
        )
        if not is_known:
            self._figures = _figures(self._path)
            self._inode, self._look_at = stat.st_ino, time.monotonic() + _LOOK_S
        return self._figures


def mapped_file(smaps: str, path: Path) -> MappedFile | None:
    """Return the largest mapping of `path`, as it is named now, in the text of /proc/self/smaps."""
    area = _AREA.format(name=re.escape(str(path.resolve())))
    found = [_parse(int(start, 16), lines) for start, lines in re.findall(area, smaps, re.M)]
    return max(found, key=lambda file: file.mapped_bytes, default=None)


def larger_pages_command(directory: Path) -> str | None:
    """Return root's command to run before an arena is made in `directory`, to get it huge pages.

    None: this kernel has none for that kind of mount.
    """
    mount = mount_of(directory)
    if mount is None or mount.kind != "tmpfs" or not _pmd_bytes():
        return None
    if "[deny]" in _read(_THP / "shmem_enabled"):
        return f"echo never > {_THP / 'shmem_enabled'}"
    asked = [option for option in mount.options if option.startswith("huge=")]
    if not asked or asked == ["huge=never"]:
        return f"mount -o remount,huge=advise {mount.point}"
    return "echo 1 > /proc/sys/vm/compact_memory"  # it was asked for, but memory is in pieces


def _figures(path: Path) -> dict[str, Any]:
    file = mapped_file(_SMAPS.read_text(), path)
    if file is None:
        return {}
    # The end of a file may be less than a huge page.
    is_huge = file.mapped_bytes - file.huge_page_bytes < file.huge_bytes > 0
    figures = {
        **asdict(file),
        "numa_nodes": len(numa.memory_nodes()),
        "interleaved_nodes": len(numa.interleaved_over(file.address)),
        "command": None if is_huge else larger_pages_command(path.parent),
    }
    del figures["address"]
    return figures


def _parse(address: int, lines: str) -> MappedFile:
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"(\w+): +(\d+) kB", lines)}
    hugetlb = sizes["Shared_Hugetlb"] + sizes["Private_Hugetlb"]
    return MappedFile(
        address=address,
        mapped_bytes=hugetlb or sizes["Rss"],
        huge_bytes=hugetlb or sizes["ShmemPmdMapped"],
        huge_page_bytes=sizes["KernelPageSize"] if hugetlb else _pmd_bytes(),
    )


def _pmd_bytes() -> int:
    """Return the size of a huge page in tmpfs; 0: the kernel has none."""
    return int(_read(_THP / "hpage_pmd_size") or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
