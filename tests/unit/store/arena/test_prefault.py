"""Mappings populated at once and in the background, and the calls that progress can end."""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvray.store import Arena
from kvray.store.arena import prefault
from kvray.store.arena.layout import RETIRED
from kvray.store.arena.prefault import Populator, mapping_of, populate
from kvray.store.arena.tables import Array
from tests.unit.store.mounted import run_mounted
from tests.unit.store.small_arena import make_arena
from tests.waiting import HANG_S, wait_for

MIB = 2**20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(prefault, "_QUIET_CHUNK_BYTES", 2**14)


def map_new(directory: Path, size: int = 11 * MIB // 2) -> Array:
    """Return a new file in shared memory, by itself of five and a half chunks."""
    with (directory / "file").open("w+b") as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)


def mapped_share(memory: Array) -> float:
    """Return how much of `memory` this process has mapped, as /proc/self/pagemap says."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(memory.ctypes.data // page * 8)
        entries = np.frombuffer(pagemap.read(-(-memory.nbytes // page) * 8), dtype=np.uint64)
    return float((entries >> np.uint64(63)).mean())


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_all_is_allocated_mapped_and_told_of(directory: Path, threads: int | None) -> None:
    memory = map_new(directory)
    told: list[tuple[int, int]] = []
    assert populate(memory, threads=threads, progress=lambda *figures: told.append(figures))
    assert mapped_share(memory) == 1
    assert (directory / "file").stat().st_blocks * 512 == memory.nbytes
    assert [done for done, _ in told] == [*range(MIB, 6 * MIB, MIB), memory.nbytes]
    assert {total for _, total in told} == {memory.nbytes}


def test_what_the_pages_hold_stays(directory: Path) -> None:
    memory = map_new(directory)
    memory[::4099] = 7
    assert populate(memory)
    assert (memory[::4099] == 7).all()
    assert int(memory.sum()) == 7 * len(memory[::4099])


def test_what_progress_raises_ends_it_soon(directory: Path) -> None:
    memory = map_new(directory, 64 * MIB)

    def stop(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        populate(memory, threads=1, progress=stop)
    assert mapped_share(memory) < 0.5


def test_an_older_kernel_is_told_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = map_new(directory)
    monkeypatch.setattr(prefault, "_POPULATE_WRITE", 4242)
    assert not populate(memory)
    assert mapped_share(memory) == 0


def test_pages_that_cannot_be_had_are_an_error_and_no_signal(directory: Path) -> None:
    memory = map_new(directory)
    os.truncate(directory / "file", MIB)
    with pytest.raises(OSError, match="No space left") as caught:
        populate(memory)
    assert caught.value.errno == errno.ENOSPC


def test_other_threads_of_python_go_on_meanwhile(directory: Path) -> None:
    memory = map_new(directory, 256 * MIB)
    turns = 0

    def count(is_over: Callable[[], bool]) -> None:
        nonlocal turns
        while not is_over():
            turns += 1
            time.sleep(0)

    over = threading.Event()
    counter = threading.Thread(target=count, args=(over.is_set,))
    counter.start()
    before = turns
    prefault._populate(memory)
    gained = turns - before
    over.set()
    counter.join()
    assert gained > 10


@pytest.mark.root
def test_a_mount_that_gives_huge_pages_is_asked_for_them() -> None:
    said = run_mounted(IN_HUGE_PAGES, kind="tmpfs", options="huge=advise,size=64m")
    assert said == "True True"


IN_HUGE_PAGES = """
from kvray.store import Arena, ArenaSpec
from kvray.store.machine.pages import ArenaPages
from kvray.store.arena.prefault import mapping_of, populate
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=16 * MiB, slab=MiB, slot_min=65536, holders_max=4)
arena = Arena.create(mounted, spec, lock_wait_s=1)
populate(mapping_of(arena.tables))
figures = ArenaPages(mounted / "arena").figures()
print(figures["huge_bytes"] >= 16 * MiB, figures["command"] is None)
"""


# -- in the background ----------------------------------------------------------------------------


def populating() -> bool:
    return any(thread.name == "kvray-populate" for thread in threading.enumerate())


def test_the_background_maps_all_and_ends(directory: Path) -> None:
    make_arena(directory).close()
    arena = Arena(directory, lock_wait_s=1)
    memory = mapping_of(arena.tables)
    assert mapped_share(memory) < 0.5
    populator = Populator(arena.tables)
    wait_for(lambda: not populating())
    assert mapped_share(memory) == 1
    populator.stop()
    arena.close()


@pytest.mark.parametrize("how", ["stop", "retire"])
def test_the_background_ends_before_all_is_mapped(
    directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    make_arena(directory).close()
    arena = Arena(directory, lock_wait_s=1)
    entered, go_on = threading.Event(), threading.Event()

    def populate_slowly(chunk: Array) -> bool:
        entered.set()
        go_on.wait(HANG_S)
        return True

    monkeypatch.setattr(prefault, "_populate", populate_slowly)
    populator = Populator(arena.tables)
    assert entered.wait(HANG_S)
    if how == "stop":
        populator._stopping.set()
    else:
        arena.tables.header["state"] = RETIRED
    go_on.set()
    populator.stop()
    assert not populating()
    arena.close()


def test_memory_that_cannot_be_mapped_ends_the_background_quietly(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena(directory)

    def fail(chunk: Array) -> bool:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(prefault, "_populate", fail)
    Populator(arena.tables).stop()
    arena.close()


def test_the_bytes_of_an_arena_are_all_of_its_file(directory: Path) -> None:
    arena = make_arena(directory)
    memory = mapping_of(arena.tables)
    assert memory.nbytes == (directory / "arena").stat().st_size
    assert memory.ctypes.data == arena.tables.header.ctypes.data
    assert ctypes.string_at(memory.ctypes.data, 8) == b"KVRAYARN"
    arena.close()
