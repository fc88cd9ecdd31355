"""The file of an arena: made whole or not at all, refused if it is not what it should be."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.store.arena import prefault
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.layout import FORMAT_VERSION, HEADER, RETIRED
from tests.unit.store.mounted import huge_pages, run_mounted
from tests.unit.store.small_arena import chain, make_arena, spec, store

UNKNOWN_ADVICE = 4242
"""What `madvise` answers with EINVAL, as an older kernel does where this one populates."""


def overwrite(directory: Path, field: str, value: object) -> None:
    header = np.memmap(directory / ARENA_FILE, HEADER, "r+", shape=(1,))
    header[field] = value
    header.flush()


def test_new_arena_says_what_was_asked(directory: Path) -> None:
    done: list[tuple[int, int]] = []
    arena = Arena.create(
        directory, spec(), lock_wait_s=1, progress=lambda *figures: done.append(figures)
    )
    size = (directory / ARENA_FILE).stat().st_size
    assert done[-1] == (size, size)
    assert (arena.cluster_name, len(arena.arena_id)) == ("test", 16)
    assert arena.tables.geometry == spec().geometry()
    assert sorted(path.name for path in directory.iterdir()) == ["arena", f"lock.{arena.arena_id}"]
    assert (directory / ARENA_FILE).stat().st_blocks * 512 >= size, "it is not allocated"
    arena.close()


def test_missing_arena_is_one_sentence(directory: Path) -> None:
    with pytest.raises(ShardUnavailable, match=r"no arena at .*kvray up"):
        Arena(directory, lock_wait_s=1)


def test_another_format_version_is_refused(directory: Path) -> None:
    make_arena(directory).close()
    overwrite(directory, "format_version", FORMAT_VERSION + 1)
    with pytest.raises(ShardUnavailable, match=f"format {FORMAT_VERSION + 1}, not"):
        Arena(directory, lock_wait_s=1)


def test_torn_header_is_refused(directory: Path) -> None:
    make_arena(directory).close()
    overwrite(directory, "holders_max", 9)
    with pytest.raises(ShardUnavailable, match="damaged header"):
        Arena(directory, lock_wait_s=1)


def test_file_that_is_no_arena_is_refused(directory: Path) -> None:
    (directory / ARENA_FILE).write_bytes(b"x" * 10000)
    with pytest.raises(ShardUnavailable, match="no arena, or was never finished"):
        Arena(directory, lock_wait_s=1)


def test_refusal_that_is_kept_does_not_keep_the_arena_mapped(directory: Path) -> None:
    arena = make_arena(directory)
    ArenaOwner(arena).retire()
    made = make_arena(directory)
    made.tables.state = RETIRED
    arena.close()
    made.close()
    with pytest.raises(ShardUnavailable) as kept:
        Arena(directory, lock_wait_s=1)
    assert kept.tb is not None
    assert str(directory / ARENA_FILE) not in Path("/proc/self/maps").read_text()


def test_arena_without_its_lock_file_is_refused(directory: Path) -> None:
    arena = make_arena(directory)
    (directory / f"lock.{arena.arena_id}").unlink()
    arena.close()
    with pytest.raises(ShardUnavailable, match="no lock file"):
        Arena(directory, lock_wait_s=1)
    assert [path.name for path in directory.iterdir()] == [ARENA_FILE]


def test_retired_arena_is_refused_and_its_lock_file_does_not_come_back(directory: Path) -> None:
    arena = make_arena(directory)
    kept = directory / "kept"
    os.link(directory / ARENA_FILE, kept)
    ArenaOwner(arena).retire()
    assert [path.name for path in directory.iterdir()] == ["kept"]
    kept.rename(directory / ARENA_FILE)
    with pytest.raises(ShardUnavailable):
        Arena(directory, lock_wait_s=1)
    assert [path.name for path in directory.iterdir()] == [ARENA_FILE]
    arena.close()


def test_retiring_spares_the_successor(directory: Path) -> None:
    old = make_arena(directory)
    new = make_arena(directory)
    ArenaOwner(old).retire()
    opened = Arena(directory, lock_wait_s=1)
    assert opened.arena_id == new.arena_id
    opened.join("x")
    store(opened, chain(3))
    for arena in (old, new, opened):
        arena.close()


@pytest.mark.root
def test_full_mount_is_one_sentence_and_leaves_no_file() -> None:
    said = run_mounted(FULL, kind="tmpfs", options="size=16m")
    assert "could not be had in" in said
    assert "(No space left on device); lower arena.capacity." in said
    assert said.endswith("left: []")


FULL = """
from kvray.errors import CapacityError
from kvray.store import Arena, ArenaSpec
from kvray.store.arena import file as arena_file
arena_file.check_room = lambda *args, **more: None  # as if another filled the mount meanwhile
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=32 * MiB, slab=MiB, slot_min=65536, holders_max=4)
try:
    Arena.create(mounted, spec, lock_wait_s=1)
except CapacityError as error:
    print(error)
print("left:", list(mounted.iterdir()))
"""


def test_failed_create_leaves_no_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prefault, "_POPULATE_WRITE", UNKNOWN_ADVICE)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(CapacityError, match=r"No space left on device.*lower arena\.capacity"):
        make_arena(directory)
    assert list(directory.iterdir()) == []


def test_what_progress_raises_ends_the_making(directory: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise ShardUnavailable("stopped")

    with pytest.raises(ShardUnavailable, match="stopped"):
        Arena.create(directory, spec(), lock_wait_s=1, progress=stop)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_create_leaves_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(old: object, new: object) -> None:
        raise error

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(error):
        make_arena(directory)
    assert list(directory.iterdir()) == []


def test_half_made_file_of_a_dead_owner_is_removed(directory: Path) -> None:
    (directory / "arena.0123456789abcdef.new").write_bytes(b"x")
    make_arena(directory).close()
    assert not list(directory.glob("*.new"))


def test_kernel_without_populate_makes_an_arena_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "_POPULATE_WRITE", UNKNOWN_ADVICE)
    done: list[tuple[int, int]] = []
    arena = Arena.create(
        directory, spec(), lock_wait_s=1, progress=lambda *figures: done.append(figures)
    )
    arena.close()
    stat = (directory / ARENA_FILE).stat()
    assert stat.st_blocks * 512 >= stat.st_size, "it is not allocated"
    assert done == [(stat.st_size, stat.st_size)]


@pytest.mark.root
def test_arena_on_hugetlbfs_is_used_like_any_other() -> None:
    with huge_pages(40):
        said = run_mounted(ON_HUGETLBFS, kind="hugetlbfs", options="pagesize=2M")
    assert said == "8 read, locked, listening, all in huge pages"


ON_HUGETLBFS = """
import socket
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.store.arena.file import holds_arena
from kvray.store.machine.pages import ArenaPages
from kvray.store.arena.prefault import mapping_of, populate
from tests.unit.store.small_arena import chain, fetch, store
KiB = 1024
spec = ArenaSpec(
    cluster_name="x", capacity=65000 * KiB, slab=1000 * KiB, slot_min=4096, holders_max=4
)
arena = Arena.create(mounted, spec, lock_wait_s=1)
arena.join("test")
keys = chain(8)
store(arena, keys)
held = arena.lease(keys)[0]
assert holds_arena(mounted / "arena", arena.arena_id)
second = Arena(mounted, lock_wait_s=1)
assert fetch(second, keys, held)
with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as engine:
    server.bind(str(mounted / "socket"))
    server.listen()
    engine.connect(str(mounted / "socket"))
populate(mapping_of(arena.tables))
figures = ArenaPages(mounted / "arena").figures()
assert figures["huge_bytes"] == figures["mapped_bytes"] >= spec.geometry().file_bytes, figures
assert figures["command"] is None
print(held.num_slots, "read, locked, listening, all in huge pages")
second.close()
ArenaOwner(arena).retire()
arena.close()
"""


def test_largest_capacity_is_the_last_that_fits() -> None:
    asked = replace(spec(), slab=2**20, slot_min=2**16)
    room = 2**30
    largest = asked.largest_capacity(room)
    assert replace(asked, capacity=largest).geometry().file_bytes <= room
    assert replace(asked, capacity=largest + 2**20).geometry().file_bytes > room


def test_nothing_fits_into_no_room() -> None:
    assert spec().largest_capacity(0) == spec().largest_capacity(-(2**30)) == 0
    assert replace(spec(), slot_min=2**30).largest_capacity(2**29) == 0


def test_arena_that_cannot_fit_is_refused_before_anything_is_made(directory: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs 1048576.* but"):
        make_arena(
            directory,
            asked=ArenaSpec(
                cluster_name="x", capacity=2**50, slab=2**40, slot_min=2**30, holders_max=4
            ),
        )
    assert list(directory.iterdir()) == []


def test_directory_that_cannot_be_used_is_one_sentence(directory: Path) -> None:
    with pytest.raises(ConfigError, match="No arena can be made in"):
        make_arena(directory / "missing")
