"""What the kernel says of pages and NUMA nodes, and the command that gets larger pages."""

import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from kvray.store import ArenaOwner
from kvray.store.arena.prefault import mapping_of, populate
from kvray.store.machine import pages
from kvray.store.machine.capacity import Mount
from tests.unit.store.small_arena import make_arena

SMAPS = """\
7fc9f0400000-7fc9f2400000 rw-s 00000000 00:27 2                          /shm/arena
KernelPageSize:        4 kB
Rss:               16384 kB
ShmemPmdMapped:    14336 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr sh mr mw me ms hg
7fca00000000-7fca00001000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
Rss:                   4 kB
ShmemPmdMapped:        0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
7fcb00000000-7fcb04000000 rw-s 00000000 00:27 2                          /huge/arena
KernelPageSize:     2048 kB
Rss:                   0 kB
ShmemPmdMapped:        0 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:   63488 kB
7fcc00000000-7fcc02000000 rw-s 00000000 00:27 2                          /shm/arena
KernelPageSize:        4 kB
Rss:                   8 kB
ShmemPmdMapped:        0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
"""
MIB = 2**20


@pytest.fixture
def thp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's settings of huge pages."""
    monkeypatch.setattr(pages, "_THP", tmp_path)
    (tmp_path / "hpage_pmd_size").write_text(f"{2 * MIB}\n")
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "address", "mapped", "huge"),
    [
        pytest.param("/shm/arena", 0x7FC9F0400000, 16, 14, id="the fuller of two mappings"),
        pytest.param("/huge/arena", 0x7FCB00000000, 64, 64, id="all of hugetlbfs is huge"),
    ],
)
def test_mapped_files_have_figures_and_no_others(thp, path, address, mapped, huge):
    file = pages.mapped_file(SMAPS, Path(path))
    assert file is not None
    assert (file.address, file.mapped_bytes) == (address, mapped * MIB)
    assert (file.huge_bytes, file.huge_page_bytes) == (huge * MIB, 2 * MIB)
    assert pages.mapped_file(SMAPS, Path("/shm/other")) is None


@pytest.mark.parametrize(
    ("kind", "options", "command"),
    [
        ("tmpfs", ("rw", "size=1g"), "mount -o remount,huge=advise /dev/shm"),
        ("tmpfs", ("rw", "huge=never"), "mount -o remount,huge=advise /dev/shm"),
        ("tmpfs", ("rw", "huge=advise"), "echo 1 > /proc/sys/vm/compact_memory"),
        ("hugetlbfs", ("rw", "pagesize=2M"), None),
        ("ext4", ("rw",), None),
    ],
)
def test_one_command_gets_larger_pages(thp, monkeypatch, kind, options, command):
    mount = Mount(point=Path("/dev/shm"), kind=kind, device="0:1", root="/", options=options)
    monkeypatch.setattr(pages, "mount_of", lambda path: mount)
    assert pages.larger_pages_command(Path("/dev/shm/kvray-x")) == command


def test_a_kernel_that_denies_huge_pages_is_told_to_give_them_if_it_has_them(thp):
    (thp / "shmem_enabled").write_text("always within_size advise never [deny] force\n")
    assert pages.larger_pages_command(Path("/dev/shm")) == f"echo never > {thp}/shmem_enabled"
    (thp / "hpage_pmd_size").unlink()
    assert pages.larger_pages_command(Path("/dev/shm")) is None


# -- of a real arena ------------------------------------------------------------------------------


def test_figures_are_read_till_all_of_an_arena_is_mapped_and_then_of_its_successor(
    directory, monkeypatch
):
    monkeypatch.setattr(pages, "_LOOK_S", 0.0)
    asked = pages.ArenaPages(directory / "arena")
    assert asked.figures() == {}
    arena = make_arena(directory)
    before = asked.figures()
    populate(mapping_of(arena.tables))
    figures = asked.figures()
    assert figures["mapped_bytes"] > before["mapped_bytes"]
    assert figures["mapped_bytes"] >= (directory / "arena").stat().st_size
    assert figures["numa_nodes"] == len(pages.memory_nodes())
    monkeypatch.setattr(pages, "_SMAPS", Path("/nowhere"))
    assert asked.figures() == figures, "it was asked again, which takes long"
    monkeypatch.undo()
    ArenaOwner(arena).retire()
    successor = make_arena(directory)
    assert asked.figures()["mapped_bytes"] < figures["mapped_bytes"]
    arena.close()
    successor.close()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7]), ("\n", [])],
)
def test_a_list_of_nodes_is_read_as_the_kernel_writes_it(text, nodes):
    assert pages.parse_nodes(text) == nodes


def test_a_mask_has_one_bit_for_each_node():
    mask = pages.node_mask([0, 1, 63, 64, 1023])
    assert struct.unpack("<16Q", mask) == (1 << 63 | 3, 1, *13 * [0], 1 << 63)
    assert pages.nodes_of(mask) == [0, 1, 63, 64, 1023]


def test_the_kernel_interleaves_and_tells_so():
    memory = np.frombuffer(mmap.mmap(-1, 2**20), dtype=np.uint8)
    assert not pages.interleave(memory, [1000]), "there is no such node"
    assert pages.interleaved_over(memory.ctypes.data) == []
    nodes = pages.memory_nodes()
    if not nodes:
        pytest.skip("this kernel knows no NUMA nodes")
    assert pages.interleave(memory, nodes)
    assert pages.interleaved_over(memory.ctypes.data) == nodes
