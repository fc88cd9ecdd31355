import mmap
import struct

import numpy as np
import pytest

from kvray.store.machine.numa import (
    interleave,
    interleaved_over,
    memory_nodes,
    node_mask,
    nodes_of,
    parse_nodes,
)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7]), ("\n", [])],
)
def test_a_list_of_nodes_is_read_as_the_kernel_writes_it(text: str, nodes: list[int]) -> None:
    assert parse_nodes(text) == nodes


def test_a_mask_has_one_bit_for_each_node() -> None:
    mask = node_mask([0, 1, 63, 64, 1023])
    words = struct.unpack("<16Q", mask)
    assert (words[0], words[1], words[15]) == (1 << 63 | 3, 1, 1 << 63)
    assert nodes_of(mask) == [0, 1, 63, 64, 1023]


def test_the_kernel_interleaves_and_tells_so() -> None:
    nodes = memory_nodes()
    if not nodes:
        pytest.skip("this kernel knows no NUMA nodes")
    memory = np.frombuffer(mmap.mmap(-1, 2**20), dtype=np.uint8)
    assert interleaved_over(memory.ctypes.data) == []
    assert interleave(memory, nodes)
    assert interleaved_over(memory.ctypes.data) == nodes


def test_nodes_that_are_not_there_are_refused() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2**20), dtype=np.uint8)
    assert not interleave(memory, [1000])
    assert interleaved_over(memory.ctypes.data) == []
