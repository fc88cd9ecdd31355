"""Mutual exclusion and liveness between processes: POSIX record locks on an arena's side file.

A record lock belongs to a process, survives nothing of it, and is dropped when the process closes
*any* descriptor of the file. So each side file is opened once per process, by the registry here,
and never closed before exit. Record locks do not exclude threads of one process from each other:
a `threading.Lock` stands in front. A forked child inherits the descriptors but no locks: it is
detached and can never take one.

`fcntl` is called through `ctypes.PyDLL`, which keeps the GIL: the holder of the arena's lock must
not stop to wait for another thread of its own process.
"""

import ctypes
import errno
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from kvray.errors import ShardUnavailable

ARENA_BYTE = 0
OWNER_BYTE = 1
HOLDER_BYTES = 16
"""Holder h's liveness byte is HOLDER_BYTES + h."""

_F_RDLCK, _F_WRLCK, _F_UNLCK = 0, 1, 2
_F_GETLK, _F_SETLK = 5, 6
_BACKOFF_S = (0.00002, 0.00005, 0.0001, 0.0002)


class _Flock(ctypes.Structure):
    """struct flock of 64-bit Linux."""

    _fields_ = (
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    )


_libc = ctypes.PyDLL(None, use_errno=True)


class SideFile:
    """One process's only descriptor of a lock file."""

    _open: dict[Path, "SideFile"] = {}  # noqa: RUF012 - the registry of this process
    _replaced: list["SideFile"] = []  # noqa: RUF012 - those whose file was unlinked since
    _registry_lock = threading.Lock()

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open `path`; use `SideFile.at` instead."""
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o600)
        self.thread_lock = threading.Lock()
        self._own: set[int] = set()
        self._detached = False

    @classmethod
    def at(cls, path: Path, *, create: bool = True) -> "SideFile":
        """Return the process's side file at `path`.

        Raises:
            OSError: it cannot be opened, or is not there and `create` is not set.
        """
        # Two names of one file must not give two descriptors, whose locks would not exclude.
        path = path.resolve()
        with cls._registry_lock:
            known = cls._open.get(path)
            if known is None or not known.is_current():
                opened = cls(path, create=create)
                if known is not None:
                    cls._replaced.append(known)
                known = cls._open[path] = opened
            return known

    @classmethod
    def detach_child(cls) -> None:
        """After a fork: the parent's locks are not the child's, and never will be."""
        cls._registry_lock = threading.Lock()
        for side_file in [*cls._open.values(), *cls._replaced]:
            side_file._detached = True
            side_file._own.clear()
            side_file.thread_lock = threading.Lock()

    @property
    def detached(self) -> bool:
        """Whether this process is a fork of the one that opened the file, and can lock nothing."""
        return self._detached

    def is_current(self) -> bool:
        """Return whether the path still names this file: a lock on another excludes nobody."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def try_lock(self, byte: int) -> bool:
        """Take the exclusive lock on `byte` if nobody has it; never waits."""
        if self._detached or byte in self._own or not self._set(byte, _F_WRLCK):
            return False
        self._own.add(byte)
        return True

    def unlock(self, byte: int) -> None:
        """Give up the lock on `byte`."""
        if byte in self._own:
            self._own.discard(byte)
            self._set(byte, _F_UNLCK)

    def holder_of(self, byte: int) -> int | None:
        """Return the pid of the living process that has the lock on `byte`; None if nobody has.

        A pid of another container may read 0 or mean nothing here; that there is one is sure.
        """
        if byte in self._own:
            return os.getpid()
        flock = _Flock(_F_WRLCK, os.SEEK_SET, byte, 1, 0)
        if _libc.fcntl(self._fd, _F_GETLK, ctypes.byref(flock)) != 0:
            raise OSError(ctypes.get_errno(), "fcntl(F_GETLK) failed", str(self.path))
        return None if flock.l_type == _F_UNLCK else int(flock.l_pid)

    def _set(self, byte: int, kind: int) -> bool:
        if _libc.fcntl(self._fd, _F_SETLK, _request(byte, kind)) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EACCES, errno.EINTR):
            return False
        raise ShardUnavailable(
            f"{self.path} cannot be locked ({os.strerror(code)}); arena.dir must be a local file"
            " system such as /dev/shm."
        )


@cache
def _request(byte: int, kind: int) -> Any:
    """Return what F_SETLK is given, which it does not change; made once, as it costs a call."""
    return ctypes.byref(_Flock(kind, os.SEEK_SET, byte, 1, 0))


os.register_at_fork(after_in_child=SideFile.detach_child)


class ArenaLock:
    """The lock over an arena's tables: tried for a bounded time, never waited for."""

    def __init__(self, side_file: SideFile) -> None:
        """Lock byte ARENA_BYTE of `side_file`."""
        self._side_file = side_file

    def acquire(self, wait_s: float) -> bool:
        """Try for at most `wait_s`; False: somebody else has it, treat it as a miss."""
        if self._side_file.detached:
            return False
        deadline = time.monotonic() + wait_s
        if not self._side_file.thread_lock.acquire(timeout=wait_s):
            return False
        taken = False
        try:
            taken = self._try_until(deadline)
        finally:
            # Also when it raises, be it Ctrl-C while it sleeps: other threads must go on.
            if not taken:
                self._side_file.thread_lock.release()
        return taken

    def release(self) -> None:
        """Give the lock up; only its taker may call this."""
        try:
            self._side_file.unlock(ARENA_BYTE)
        finally:
            self._side_file.thread_lock.release()

    def _try_until(self, deadline: float) -> bool:
        attempt = 0
        while not self._side_file.try_lock(ARENA_BYTE):
            pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            attempt += 1
            if time.monotonic() + pause > deadline:
                return False
            time.sleep(pause)
        return True
