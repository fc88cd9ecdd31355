"""Spreads memory over a machine's NUMA nodes, so that no engine is far from all blocks.

The policy is set before the memory is touched. That of a file in shared memory belongs to the file
and holds for whoever touches a page first.
"""

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

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
