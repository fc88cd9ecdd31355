"""The memory of an arena: its page sizes, its nodes, and the command that gets larger pages.

The figures are those of this process's mapping, which it must have populated: the kernel reports
huge pages only where they are mapped.

Memory is spread over a machine's NUMA nodes, so that no engine is far from all blocks. The policy
is set before the memory is touched. That of a file in shared memory belongs to the file and holds
for whoever touches a page first.
"""

import ctypes
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kvray.store.machine.capacity import mount_of

Array = npt.NDArray[Any]

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
        "numa_nodes": len(memory_nodes()),
        "interleaved_nodes": len(interleaved_over(file.address)),
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


_MEMORY_NODES = Path("/sys/devices/system/node/has_memory")
_INTERLEAVE = 3
_OF_ADDRESS = 2
_NODES_MAX = 1024
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of the system calls mbind and get_mempolicy, for which libc has no functions."""

_libc = ctypes.CDLL(None, use_errno=True)


def memory_nodes() -> list[int]:
    """Return the NUMA nodes that have memory; [] where the kernel does not say."""
    try:
        return parse_nodes(_MEMORY_NODES.read_text())
    except OSError:
        return []


def spread(memory: Array) -> None:
    """Interleave `memory`, which nobody has touched, if there is more than one node."""
    nodes = memory_nodes()
    if len(nodes) > 1:
        interleave(memory, nodes)


def parse_nodes(text: str) -> list[int]:
    """Return the numbers of a list in the kernel's form, such as "0-3,8"."""
    nodes: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(memory: Array, nodes: Sequence[int]) -> bool:
    """Take the pages of `memory` from `nodes` by turns; False: this machine does not allow it.

    `memory` is a mapping from a page's start on, not touched yet.
    """
    if platform.machine() not in _CALLS:
        return False
    number, _ = _CALLS[platform.machine()]
    where = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    answer = _libc.syscall(number, *where, _INTERLEAVE, node_mask(nodes), _NODES_MAX + 1, 0)
    return bool(answer == 0)


def interleaved_over(address: int) -> list[int]:
    """Return the nodes over which the memory at `address` is interleaved; [] if it is not."""
    if platform.machine() not in _CALLS:
        return []
    _, number = _CALLS[platform.machine()]
    mode, mask = ctypes.c_int(), ctypes.create_string_buffer(_NODES_MAX // 8)
    where = ctypes.c_void_p(address), _OF_ADDRESS
    answer = _libc.syscall(number, ctypes.byref(mode), mask, _NODES_MAX + 1, *where)
    return nodes_of(mask.raw) if answer == 0 and mode.value == _INTERLEAVE else []


def node_mask(nodes: Sequence[int]) -> bytes:
    """Return the bit mask of `nodes` as the kernel of a little-endian machine reads it."""
    return sum(1 << node for node in set(nodes)).to_bytes(_NODES_MAX // 8, "little")


def nodes_of(mask: bytes) -> list[int]:
    """Return the nodes of a mask, in order."""
    bits = int.from_bytes(mask, "little")
    return [node for node in range(_NODES_MAX) if bits >> node & 1]
