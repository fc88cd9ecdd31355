"""The ownership of a node's directory: it belongs to this user, and to one shard at a time.

In a shared directory anybody can create a link or a directory of our name. So kvray does nothing in
a directory of another user.

The owner holds the lock on a byte of the owner file; the lock ends with its process. A shard holds
it for life (`claim`), a command while it removes files.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from kvray.errors import ConfigError
from kvray.store.arena.file import ARENA_FILE, lock_path
from kvray.store.arena.owner import retire_file
from kvray.store.machine.access import Access, reason
from kvray.store.machine.access import is_own as is_own_directory
from kvray.store.machine.side_file import OWNER_BYTE, SideFile
from kvray.wire import MOVER_SOCKET_FILE, SOCKET_FILE

OWNER_FILE = "owner"
NOTE_FILE = "owner.json"
"""Names the owner for people; it counts only if the lock confirms it."""
EVENTS_FILE = "events.sqlite"
"""What `DescribedBlocks` keeps; SQLite has more files of that name and an ending."""
_RETRY_S = 0.1


def is_own(directory: Path) -> bool:
    """Return whether `directory` exists, is not a link, and belongs to this user."""
    try:
        return is_own_directory(directory.lstat())
    except OSError:
        return False


def make_directory(directory: Path, access: Access) -> None:
    """Make the directory, with the rights of `access`; others may remove it at any time."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The arena's directory {directory} cannot be made {reason(error)}"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        # In a shared directory anybody may have made a link.
        access.check_own(directory)
        access.give_directory(directory)


def let_in(directory: Path, arena_id: str, access: Access) -> None:
    """Give arena and lock file the rights of `access`; ConfigError: that is not permitted."""
    try:
        for path in (lock_path(directory, arena_id), directory / ARENA_FILE):
            access.give(path)
    except OSError as error:
        raise ConfigError(
            f"The permissions of the arena in {directory} cannot be set ({error.strerror}); end"
            " its tier with `kvray down`, and run every shard as one user."
        ) from None


def open_owner_file(directory: Path) -> SideFile | None:
    """Return the file of the owner lock; None if the directory has just been removed."""
    try:
        return SideFile.at(directory / OWNER_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{directory / OWNER_FILE} cannot be opened ({error.strerror}); make {directory}"
            " writable for this user, or choose another arena.dir."
        ) from None


def sweep(directory: Path, wait_s: float = 0.0) -> bool:
    """Remove the files of a dead shard in `KVRayConfig.node_dir`; return whether it is gone.

    An owner that is ending has `wait_s` for it; the files of a living one stay.
    """
    deadline = time.monotonic() + wait_s
    while is_own(directory):
        with as_owner(directory) as is_owner:
            if is_owner:
                remove_files(directory)
        if not directory.exists() or time.monotonic() >= deadline:
            break
        time.sleep(_RETRY_S)
    return not directory.exists()


@contextlib.contextmanager
def as_owner(directory: Path) -> Iterator[bool]:
    """Have the owner lock during a block; False if a process owns the directory."""
    file = open_owner_file(directory)
    if file is None or not file.try_lock(OWNER_BYTE):
        yield False
        return
    try:
        yield file.is_current()  # else the last owner removed the file while it ended
    finally:
        file.unlock(OWNER_BYTE)


def remove_files(directory: Path) -> None:
    """Retire the arena in `directory`, if there is one, and remove all files of ours.

    Only the holder of the owner lock may; others call `sweep`. Files of others stay.
    """
    with contextlib.suppress(OSError):
        retire_file(directory / ARENA_FILE)
    remove_leftovers(directory)
    for name in (SOCKET_FILE, MOVER_SOCKET_FILE, NOTE_FILE, OWNER_FILE):
        (directory / name).unlink(missing_ok=True)
    remove_events(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove_events(directory: Path) -> None:
    """Remove what was kept for KV events; nobody may have it open."""
    for path in directory.glob(f"{EVENTS_FILE}*"):
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path, keep: str | None = None) -> None:
    """Remove half-made arenas, and all locks but that of the arena with the id `keep`.

    Only the holder of the owner lock may.
    """
    kept = None if keep is None else lock_path(directory, keep)
    for pattern in ("arena.*.new", "lock.*"):
        for path in directory.glob(pattern):
            if path != kept:
                path.unlink(missing_ok=True)
