"""A lock file of an arena, as one process has it open: locks on single bytes of it.

The locks are Linux's open-file-description locks. Such a lock belongs to the description that took
it. It ends with the last descriptor of that description, at the latest with the process; nothing
else that a process opens or closes ends it. Every thread that enters sections has a description of
its own, so that the kernel keeps threads apart as it does processes.

A fork shares descriptions, and would keep the locks of a dead parent for as long as the child
lives. So a child closes them before it does anything else. It cannot use what its parent has
opened; what it opens itself is its own.

`fcntl` is called through `ctypes.PyDLL`, which keeps the GIL: the holder of the arena's lock must
not stop to wait for another thread of its own process.
"""

import contextlib
import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from kvray.errors import ShardUnavailable
from kvray.store.machine import lockers

ARENA_BYTE = 0
OWNER_BYTE = 1
HOLDER_BYTES = 16
"""Holder h's liveness byte is HOLDER_BYTES + h."""

LOCK, UNLOCK = 1, 2
"""F_WRLCK and F_UNLCK."""
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37


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
_opening = threading.RLock()
"""Held over each open and each fork, so that a child knows every description that it has."""


class Until(weakref.ref[Any]):
    """A weak reference whose callback may be a C function."""

    _as_parameter_ = 0


class Description:
    """An open file description of a side file: the kernel keeps locks by description."""

    __slots__ = ("__weakref__", "fd", "held", "next", "turn", "unlock")
    living: ClassVar["weakref.WeakSet[Description]"] = weakref.WeakSet()

    def __init__(self, path: str | Path, flags: int = 0) -> None:
        self.fd = -1
        self.held: Callable[[], object] | None = None
        """Gives None once the section that has the arena's lock through this has gone."""
        self.next: Until | None = None
        """The section that this thread is about to enter."""
        self.turn: threading.Lock | None = None
        """The turn that this thread has among the threads of its process."""
        with _opening:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
            self.living.add(self)
        self.unlock = partial(_libc.fcntl, self.fd, _F_OFD_SETLK, _request(ARENA_BYTE, UNLOCK))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End all its locks; in a fork, only this process's part in them."""
        fd, self.fd = self.fd, -1
        self.held = self.next = None
        if fd >= 0:
            os.close(fd)

    def set(self, byte: int, kind: int) -> bool:
        """Lock or unlock `byte`; False if somebody else has it, or this is closed."""
        if _libc.fcntl(self.fd, _F_OFD_SETLK, _request(byte, kind)) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EACCES, errno.EINTR) or self.fd < 0:
            return False
        raise ShardUnavailable(
            f"A lock file cannot be locked ({os.strerror(code)}); arena.dir must be a local file"
            " system such as /dev/shm."
        )


@cache
def _request(byte: int, kind: int) -> Any:
    """Return the argument of F_OFD_SETLK, which does not change; made once, as it costs a call."""
    return ctypes.byref(_Flock(kind, os.SEEK_SET, byte, 1, 0))


class SideFile:
    """A lock file, as this process has it open; from `SideFile.at`."""

    _open: ClassVar["weakref.WeakValueDictionary[Path, SideFile]"] = weakref.WeakValueDictionary()
    """The registry of this process. A file is closed with the last of its users."""
    _registry_lock = threading.Lock()

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._description = Description(path, os.O_CREAT if create else 0)
        self._of_thread = threading.local()
        self.turn = threading.Lock()
        self._own: set[int] = set()

    @classmethod
    def at(cls, path: Path, *, create: bool = True) -> "SideFile":
        """Return the process's side file at `path`: one object for as long as it is that file."""
        path = path.resolve()
        with cls._registry_lock:
            known = cls._open.get(path)
            if known is None or not known.is_current():
                known = cls._open[path] = cls(path, create=create)
            return known

    @classmethod
    def detach_child(cls) -> None:
        """Give up, after a fork, what the parent has opened and locked."""
        _opening.release()
        cls._registry_lock = threading.Lock()
        cls._open.clear()
        for description in list(Description.living):
            description.close()

    @property
    def detached(self) -> bool:
        """Whether a parent of this process opened the file; then this process can lock nothing."""
        return self._description.fd < 0

    def is_current(self) -> bool:
        """Return whether the path still names this file: a lock on another excludes nobody."""
        try:
            return os.path.samestat(os.fstat(self._description.fd), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def try_lock(self, byte: int) -> bool:
        """Take the exclusive lock on `byte` if nobody has it; never waits."""
        if byte in self._own or not self._description.set(byte, LOCK):
            return False
        self._own.add(byte)
        return True

    def unlock(self, byte: int) -> None:
        """Give up the lock on `byte`."""
        self._description.set(byte, UNLOCK)
        self._own.discard(byte)

    def discard(self) -> None:
        """Close the file and give up its locks; for its only user. Twice is fine."""
        with self._registry_lock:
            if self._open.get(self.path) is self:
                del self._open[self.path]
        self._description.close()

    def is_locked(self, byte: int) -> bool:
        """Return whether a living process, of any container, has the lock on `byte`."""
        return byte in self._own or self._other(byte) is not None

    def holder_of(self, byte: int) -> int | None:
        """Return the pid of the living process that has the lock on `byte`; None if nobody has.

        0: a process of another user or container, invisible from here, has it. Forks by code other
        than Python's share a lock: the pid is that of one of them.
        """
        if byte in self._own:
            return os.getpid()
        pid = self._other(byte)
        if pid is None:
            return None
        return min(self.lockers().get(byte, {0}))

    def lockers(self, *pids: int) -> dict[int, set[int]]:
        """Return byte -> processes that have it locked, of `pids` or of all that can be seen."""
        return lockers.of_file(os.fstat(self._description.fd), pids)

    def of_thread(self) -> Description | None:
        """Return this thread's own description, for the arena's lock.

        None in a fork, and while the process may open no more files.
        """
        if self._description.fd < 0:
            return None
        try:
            own: Description = self._of_thread.description
            return own
        except AttributeError:
            pass
        with contextlib.suppress(OSError):
            # By its descriptor, for the file may have lost its name.
            opened = Description(f"/proc/self/fd/{self._description.fd}")
            self._of_thread.description = opened
            return opened
        return None

    def _other(self, byte: int) -> int | None:
        """Return a pid, -1 for any lock of our kind; None if no other description has it."""
        flock = _Flock(LOCK, os.SEEK_SET, byte, 1, 0)
        if _libc.fcntl(self._description.fd, _F_OFD_GETLK, ctypes.byref(flock)) != 0:
            raise OSError(ctypes.get_errno(), "fcntl(F_OFD_GETLK) failed", str(self.path))
        return None if flock.l_type == UNLOCK else int(flock.l_pid)


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=SideFile.detach_child
)
