"""The file of an arena: made whole or not at all, refused if it is not what it should be."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena, ArenaSpec, arena_file
from kvray.store.arena_file import ARENA_FILE
from kvray.store.layout import FORMAT_VERSION, HEADER
from tests.unit.store.small_arena import chain, make_arena, spec, store


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


@pytest.mark.parametrize("size", [0, 100, 4096, 2**20])
def test_truncated_file_is_refused(directory: Path, size: int) -> None:
    make_arena(directory).close()
    os.truncate(directory / ARENA_FILE, size)
    with pytest.raises(ShardUnavailable, match=r"too short|instead of"):
        Arena(directory, lock_wait_s=1)


@pytest.mark.parametrize("field", ["capacity", "slab_bytes", "slot_min", "holders_max"])
@pytest.mark.parametrize("value", [0, 2**20 + 1, 2**63])
def test_damaged_figures_are_refused(directory: Path, field: str, value: int) -> None:
    make_arena(directory).close()
    overwrite(directory, field, value)
    with pytest.raises(ShardUnavailable, match=r"damaged|instead of"):
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
    arena.retire()
    assert [path.name for path in directory.iterdir()] == ["kept"]
    kept.rename(directory / ARENA_FILE)
    with pytest.raises(ShardUnavailable):
        Arena(directory, lock_wait_s=1)
    assert [path.name for path in directory.iterdir()] == [ARENA_FILE]
    arena.close()


def test_retiring_spares_the_successor(directory: Path) -> None:
    old = make_arena(directory)
    new = make_arena(directory)
    old.retire()
    opened = Arena(directory, lock_wait_s=1)
    assert opened.arena_id == new.arena_id
    opened.join("x")
    store(opened, chain(3))
    for arena in (old, new, opened):
        arena.close()


def test_failed_create_leaves_no_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(CapacityError, match=r"No space left on device.*lower arena\.capacity"):
        make_arena(directory)
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
    monkeypatch.setattr(arena_file, "_POPULATE_WRITE", 4242)
    make_arena(directory).close()


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


def test_name_that_does_not_fit_is_refused(directory: Path) -> None:
    asked = ArenaSpec(
        cluster_name="ü" * 33, capacity=2**20, slab=2**16, slot_min=4096, holders_max=4
    )
    with pytest.raises(ConfigError, match="cluster_name"):
        make_arena(directory, asked=asked)
