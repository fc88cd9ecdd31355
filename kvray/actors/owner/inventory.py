"""The arenas of a node, with their owners and the processes attached to them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from kvray.actors.owner.claim import Owner, owner_of
from kvray.actors.owner.ownership import (
    EVENTS_FILE,
    NOTE_FILE,
    OWNER_FILE,
    as_owner,
    is_own,
    remove_files,
)
from kvray.config import format_size
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena
from kvray.store.arena.file import ARENA_FILE, lock_path
from kvray.store.arena.holders import shown
from kvray.store.machine.side_file import HOLDER_BYTES, SideFile
from kvray.wire import MOVER_SOCKET_FILE, SOCKET_FILE

_PREFIX = "kvray-"
_SOCKETS = (SOCKET_FILE, MOVER_SOCKET_FILE)
_OUR_FILES = (
    *(ARENA_FILE, "arena.*.new", "lock.*", OWNER_FILE, NOTE_FILE, f"{EVENTS_FILE}*"),
    *_SOCKETS,
)
_NAMED_MAX = 3
_ROWS_MAX = 4096
"""Rows that a holder table may have; a look at a lock takes about a microsecond."""

Use = Literal["owned", "attached", "unused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A living process that is attached to an arena."""

    label: str | None  # None where the arena's tables cannot be read
    pid: int  # 0: of another user or container


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A directory of this user that a shard made, with its contents."""

    path: Path
    cluster_name: str
    num_bytes: int  # memory that its files take
    created: float | None  # seconds since 1970; None where there is no whole arena
    defect: str | None  # why there is no whole arena
    owner: Owner | None
    holders: tuple[Holder, ...]

    @property
    def use(self) -> Use:
        """The use of the arena; the removal of an `unused` one harms nobody."""
        if self.owner is not None:
            return "owned"
        return "attached" if self.holders else "unused"


def find_arenas(parent: Path) -> list[Finding]:
    """Return this user's directories of arenas in `parent`, by name. Changes nothing."""
    try:
        directories = sorted(parent.glob(f"{_PREFIX}*")) if parent.is_dir() else None
    except OSError:
        directories = None
    if directories is None:
        raise ConfigError(f"{parent} is no directory that can be listed; give that of arena.dir.")
    # A shard's has files of ours, or is empty.
    ours = [one for one in directories if is_own(one) and (_our_files(one) or not _names(one))]
    return [look_at(one) for one in ours]


@contextmanager
def naming_unused(parent: Path) -> Iterator[None]:
    """Let the error of an arena without room name those in `parent` that nobody uses."""
    try:
        yield
    except CapacityError as error:
        unused = [one for one in find_arenas(parent) if one.use == "unused" and one.num_bytes]
        frees = [f"{format_size(one.num_bytes)} of {one.path}" for one in unused[:_NAMED_MAX]]
        if not frees:
            raise
        says = f"{str(error).rstrip('.')}, or run `kvray sweep`, which frees {', '.join(frees)}."
        raise CapacityError(says) from None


def look_at(directory: Path) -> Finding:
    """Return the contents of an arena's directory."""
    cluster_name, created, defect = directory.name.removeprefix(_PREFIX), None, None
    labels: dict[Path, list[bytes]] = {}
    try:
        arena = Arena(directory, lock_wait_s=0.0)
    except ShardUnavailable as error:
        is_there = os.path.lexists(directory / ARENA_FILE)
        defect = str(error) if is_there else "There is no arena in it."
    else:
        cluster_name, created = arena.cluster_name, float(arena.tables.header["created"])
        labels[lock_path(directory, arena.arena_id)] = arena.tables.holder_label.tolist()
        arena.close()
    files = _our_files(directory)
    return Finding(
        path=directory,
        cluster_name=cluster_name,
        num_bytes=sum(_allocated(path) for path in files),
        created=created,
        defect=defect,
        owner=owner_of(directory),
        holders=tuple(
            holder
            for path in files
            if path.name.startswith("lock.")
            for holder in _holders(path, labels.get(path, []))
        ),
    )


def remove_unused(directory: Path) -> bool:
    """Remove an arena without owner and holders; False if it has one by now, or a file is left.

    A shard that starts meanwhile has the owner lock before us, or makes a new directory. A process
    that attaches meanwhile finds its arena retired, and looks for the next.
    """
    with as_owner(directory) as is_owner:
        if is_owner and not look_at(directory).holders:
            remove_files(directory)
    return not directory.exists()


def _our_files(directory: Path) -> list[Path]:
    return [
        directory / name
        for name in _names(directory)
        if any(fnmatch(name, pattern) for pattern in _OUR_FILES)
    ]


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; none if it is gone by now."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _holders(lock: Path, labels: list[bytes]) -> Iterator[Holder]:
    """Give the living processes that are attached to the arena of this lock, of any format."""
    try:
        side_file = SideFile.at(lock, create=False)
        rows = [row for row in range(_ROWS_MAX) if side_file.is_locked(HOLDER_BYTES + row)]
        pids = side_file.lockers() if rows else {}
    except OSError:
        return
    for row in rows:
        label = shown(labels[row]) if row < len(labels) else None
        yield Holder(label=label, pid=min(pids.get(HOLDER_BYTES + row, {0})))
