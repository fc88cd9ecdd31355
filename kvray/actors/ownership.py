"""Whose a node's directory is: this user's, and one shard's at a time.

In a directory that everybody writes to, anybody may have laid a link or a directory of our name:
nothing is done in one that is not this user's own.

The owner is who has the record locks of the owner file: OWNER_BYTE, which excludes all others, and
a byte whose place follows from the shard's name, which tells whether it is an earlier self of who
asks. Both end with their process, so neither is ever out of date. `owner.json` says it to people.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvray.errors import ConfigError, ShardUnavailable
from kvray.store.arena import ARENA_FILE, lock_path
from kvray.store.lock import OWNER_BYTE, SideFile
from kvray.store.retirement import retire_file
from kvray.wire import SOCKET_FILE

_log = logging.getLogger("kvray.shard")

OWNER_FILE = "owner"
NOTE_FILE = "owner.json"
OWNER_RETRY_S = 0.1
_OWNER_WAIT_S = 20.0
_GRACE_S = 2.0
"""How long an earlier self may take to end in order before it is ended."""
_NAME_BYTES = 2**32
"""The byte of a shard's name is one of 2**48 from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who owns a directory; name and time are None where its note cannot be read."""

    shard: str | None
    pid: int
    since: float | None
    """Seconds since 1970."""

    def __str__(self) -> str:
        if self.shard is None or self.since is None:
            return f"Process {self.pid}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"Shard {self.shard} (process {self.pid}, since {since})"


class Claim:
    """One shard's claim to a directory: tried for until it is had, then held for life."""

    def __init__(self, directory: Path, shard: str) -> None:
        """Claim `directory` for the shard of that name; its patience begins now."""
        self._directory = directory
        self._shard = shard
        name = hashlib.sha256(shard.encode()).digest()
        self._name_byte = _NAME_BYTES + int.from_bytes(name[:6], "little")
        self._began = time.monotonic()
        self._has_ended_one = False
        self._file: SideFile | None = None

    def attempt(self) -> bool:
        """Try once to become the owner; False: try again soon.

        An earlier self that still has the lock after a while, because it is frozen or lost to
        Ray, is ended: there is one shard of a name, and that is the latest.

        Raises:
            ConfigError: the directory cannot be used.
            ShardUnavailable: another shard owns it, and goes on owning it.
        """
        make_directory(self._directory)
        file = open_owner_file(self._directory)
        if file is None:
            return False
        if file.try_lock(OWNER_BYTE):
            if file.is_current():
                self._take(file)
                return True
            file.unlock(OWNER_BYTE)  # the owner before removed it while it ended
            return False
        waited = time.monotonic() - self._began
        if waited > _OWNER_WAIT_S and (owner := owner_of(self._directory)) is not None:
            raise ShardUnavailable(
                f"{owner} owns {self._directory}; end its tier with `kvray down`, or choose"
                " another cluster_name or arena.dir."
            )
        if waited > _GRACE_S and not self._has_ended_one:
            self._has_ended_one = _end_earlier_self(file, self._name_byte, self._shard)
        return False

    def release(self) -> None:
        """Give the directory up, if it was had. Twice is fine."""
        file, self._file = self._file, None
        if file is not None:
            file.unlock(self._name_byte)
            file.unlock(OWNER_BYTE)

    def _take(self, file: SideFile) -> None:
        file.try_lock(self._name_byte)
        self._file = file
        owner = Owner(shard=self._shard, pid=os.getpid(), since=time.time())
        # In a file of its own: closing the owner file would drop this process's locks on it.
        with contextlib.suppress(OSError):  # hugetlbfs knows no write
            (self._directory / NOTE_FILE).write_text(json.dumps(asdict(owner)) + "\n")


def owner_of(directory: Path) -> Owner | None:
    """Return who owns `directory` now; None if nobody does. Makes no file."""
    try:
        pid = SideFile.at(directory / OWNER_FILE, create=False).holder_of(OWNER_BYTE)
    except OSError:
        return None
    if pid is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        owner = Owner(**json.loads((directory / NOTE_FILE).read_text()))
        if owner.pid == pid:  # else an owner before has written it
            return owner
    return Owner(shard=None, pid=pid, since=None)


def _end_earlier_self(file: SideFile, name_byte: int, shard: str) -> bool:
    """Kill the process that owns the directory under this shard's own name, if one does.

    Nobody else can be hit. A pidfd stands for one process, whatever becomes of its pid. If both
    locks belong to that pid *after* the pidfd was opened, they are that process's, or it has died
    since and the signal reaches nobody. What is left is that it gives its locks up between this
    look and the signal: then it is that earlier self all the same, just at its end.
    """
    pid = file.holder_of(OWNER_BYTE)
    if not pid or pid == os.getpid():  # 0: a process of another container, out of reach
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        is_mine = os.stat(f"/proc/{pid}").st_uid == os.getuid()
        if not is_mine or not file.holder_of(OWNER_BYTE) == file.holder_of(name_byte) == pid:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # it has just ended
    finally:
        os.close(pidfd)
    _log.warning("%s: ended process %d, an earlier self that still owned the arena", shard, pid)
    return True


def is_own(directory: Path) -> bool:
    """Return whether `directory` is there, is no link to one, and is this user's."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def make_directory(directory: Path) -> None:
    """Make the directory, for this user alone.

    Raises:
        ConfigError: it cannot be made, or is not this user's.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        # In a directory that everybody writes to, a link may have been laid by anybody.
        if not is_own(directory):
            raise ConfigError(
                f"{directory} belongs to another user or is a link; choose another cluster_name"
                " or arena.dir."
            )
        directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"The arena's directory {directory} cannot be made ({error.strerror}); set arena.dir"
            " to a tmpfs that this user may write to."
        ) from None


def open_owner_file(directory: Path) -> SideFile | None:
    """Return the file of the owner lock; None if the directory has just been removed.

    Raises:
        ConfigError: it cannot be opened.
    """
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
    """Remove what a shard that is no more left in `directory`; nothing if one owns it.

    Args:
        directory: `KVRayConfig.node_dir`.
        wait_s: how long to wait for an owner that is ending.

    Returns:
        Whether nothing is left there.
    """
    deadline = time.monotonic() + wait_s
    while is_own(directory):
        owner = open_owner_file(directory)
        if owner is not None and owner.try_lock(OWNER_BYTE):
            try:
                if owner.is_current():
                    remove_files(directory)
            finally:
                owner.unlock(OWNER_BYTE)
        if not directory.exists() or time.monotonic() >= deadline:
            break
        time.sleep(OWNER_RETRY_S)
    return not directory.exists()


def remove_files(directory: Path) -> None:
    """Retire the arena in `directory`, if there is one, and remove everything that is ours.

    Only who has the owner lock may; others call `sweep`. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        retire_file(directory / ARENA_FILE)
    remove_leftovers(directory)
    for name in (SOCKET_FILE, NOTE_FILE, OWNER_FILE):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove_leftovers(directory: Path, keep: str | None = None) -> None:
    """Remove what owners that died left behind: half-made arenas, locks of arenas long gone.

    Only who has the owner lock may.

    Args:
        directory: where.
        keep: id of the arena whose lock is in use.
    """
    kept = None if keep is None else lock_path(directory, keep)
    for pattern in ("arena.*.new", "lock.*"):
        for path in directory.glob(pattern):
            if path != kept:
                path.unlink(missing_ok=True)
