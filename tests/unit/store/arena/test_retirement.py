import os
from pathlib import Path

import pytest

from kvray.store import Arena
from kvray.store.arena.layout import HEADER, RETIRED
from kvray.store.arena.owner import STATE_BYTES, retire_file


def overwrite(path: Path, at: int, what: bytes) -> None:
    """Change a file under those who map it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what)


def test_the_state_stands_where_the_layout_says() -> None:
    assert HEADER.fields is not None
    dtype, at = HEADER.fields["state"][:2]
    assert slice(at, at + dtype.itemsize) == STATE_BYTES


def test_those_who_map_a_retired_arena_see_it_and_keep_its_bytes(
    arena: Arena, directory: Path
) -> None:
    arena.tables.holder_label[7] = b"kept"
    retire_file(directory / "arena")
    assert arena.retired
    assert arena.tables.holder_label[7] == b"kept"
    assert not (directory / "arena").exists()


def test_an_arena_of_another_format_is_retired_too(arena: Arena, directory: Path) -> None:
    path = directory / "arena"
    overwrite(path, 8, (99).to_bytes(4, "little"))
    overwrite(path, 32, os.urandom(1000))
    retire_file(path)
    assert int(arena.tables.header["state"]) == RETIRED


@pytest.mark.parametrize("content", [b"", b"KVRAYARN", b"garbage" * 1000])
def test_what_is_no_arena_is_unlinked(directory: Path, content: bytes) -> None:
    path = directory / "arena"
    path.write_bytes(content)
    os.link(path, directory / "other")
    retire_file(path)
    assert not path.exists()
    assert (directory / "other").read_bytes() == content


def test_a_fifo_or_a_link_is_unlinked_and_its_target_left_alone(
    arena: Arena, directory: Path
) -> None:
    os.mkfifo(directory / "fifo")
    (directory / "link").symlink_to("arena")
    for name in ("fifo", "link", "nothing"):
        retire_file(directory / name)
        assert not os.path.lexists(directory / name)
    assert not arena.retired


def test_a_directory_is_refused(directory: Path) -> None:
    (directory / "arena").mkdir()
    with pytest.raises(OSError, match="directory"):
        retire_file(directory / "arena")
