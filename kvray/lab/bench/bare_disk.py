"""The floor of `kvray bench nvme`: bytes between memory and a file past the page cache."""

import ctypes
import errno
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvray.config import format_size
from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.runner import Duration, median_s, timed
from kvray.store.arena.tables import Array
from kvray.store.machine.capacity import mount_of
from kvray.store.nvme.transfers import IoThreads

_TRIES = 3
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MNT_DETACH = 2
_Call = Callable[[int, list[memoryview], int], int]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)


class Transfers(NamedTuple):
    """How the floor moves its bytes."""

    num_bytes: int
    """Of each transfer."""
    num_threads: int

    def __str__(self) -> str:
        """Return it in words."""
        plural = "" if self.num_threads == 1 else "s"
        return f"{format_size(self.num_bytes)} by {self.num_threads} thread{plural}"


_MIB = 2**20
TRANSFERS = tuple(
    Transfers(mib * _MIB, num_threads)
    for mib, num_threads in ((4, 2), (4, 4), (16, 1), (16, 4), (64, 1), (64, 2), (256, 1))
)
"""Tried for the floor: from several transfers at a time to one that is as large as can be."""


class BareDisk:
    """A file as large as `memory`, which is written to it and read from it, one byte to one.

    `memory` begins on the boundary of a page and has whole pages. `renew` makes the file.
    """

    def __init__(self, path: Path, memory: Array) -> None:
        self.path = path
        self._memory = memory
        self._fd = -1
        self._threads: dict[int, IoThreads] = {}

    def renew(self) -> None:
        """Make a file that has its room on the disk and in which nothing was ever written.

        Raises:
            ConfigError: its file system has no room, or refuses direct I/O.
        """
        self._drop()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        try:
            self._fd = os.open(self.path, flags, 0o600)
            os.posix_fallocate(self._fd, 0, self._memory.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise _refusal(self.path.parent, error) from None

    def store(self, transfers: Transfers) -> Duration:
        """Write all of the memory to the file, for good."""

        def work() -> None:
            self._move(os.pwritev, transfers)
            os.fdatasync(self._fd)

        return timed(work)

    def retrieve(self, transfers: Transfers) -> Duration:
        """Read all of the file into the memory."""
        return timed(lambda: self._move(os.preadv, transfers))

    def fastest(self) -> tuple[Transfers, Transfers]:
        """Return the transfers whose stores and retrieves are fastest here, by their medians."""
        size = self._memory.nbytes
        tried = [one for one in TRANSFERS if one.num_bytes <= size] or [Transfers(size, 1)]
        stores, retrieves = defaultdict(list), defaultdict(list)
        for one in tried * _TRIES:
            self.renew()
            stores[one].append(self.store(one))
            retrieves[one].append(self.retrieve(one))
        return (
            min(tried, key=lambda one: median_s(stores[one])),
            min(tried, key=lambda one: median_s(retrieves[one])),
        )

    def close(self) -> None:
        """Remove the file and end the threads. Twice is fine."""
        for threads in self._threads.values():
            threads.close()
        self._threads.clear()
        self._drop()

    def _move(self, call: _Call, transfers: Transfers) -> None:
        size, num_threads = transfers
        if num_threads not in self._threads:
            self._threads[num_threads] = IoThreads(num_threads)
        starts = range(0, self._memory.nbytes, size)
        self._threads[num_threads].run([partial(self._move_one, call, at, size) for at in starts])

    def _move_one(self, call: _Call, at: int, size: int) -> None:
        end = min(at + size, self._memory.nbytes)
        while at < end:
            done = call(self._fd, [self._memory[at:end].data], at)
            if not done:
                raise KVRayError(f"{self.path} is shorter than the bench has made it.")
            at += done

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.path.unlink(missing_ok=True)


def check_disk(directory: Path) -> None:
    """Make sure that direct I/O reaches a disk in `directory`.

    Raises:
        ConfigError: it is kept in memory, refuses direct I/O, or cannot be written to.
    """
    try:
        mount = mount_of(directory)
        if mount is not None and mount.kind in _IN_MEMORY:
            raise ConfigError(
                f"{directory} is kept in memory ({mount.kind}), where no direct I/O reaches a disk;"
                " give a directory on a disk with --dir."
            )
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refusal(directory, error) from None


def check_cold(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, and make sure that nothing of them is left there.

    Raises:
        KVRayError: something is, so that a retrieve would not come from the disk.
    """
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            resident = resident_bytes(fd)
        finally:
            os.close(fd)
        if resident:
            raise KVRayError(
                f"{format_size(resident)} of {path} are still in the page cache, so a retrieve"
                " would not come from the disk; end other programs that use this file system."
            )


def resident_bytes(fd: int) -> int:
    """Return how much of a file the page cache has; it is open for reading and writing."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype="u1")
    with mmap.mmap(fd, size) as mapping:
        # The view must go at once, or the mapping could not be closed.
        address = np.frombuffer(mapping, dtype="u1", count=1).ctypes.data
        if _libc.mincore(address, size, pages.ctypes.data):
            code = ctypes.get_errno()
            raise KVRayError(f"The page cache cannot be read ({os.strerror(code)}).")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


def mount_huge(directory: Path, *, size: int) -> None:
    """Mount a tmpfs of `size` bytes and huge pages over the empty `directory`.

    This thread gets a mount namespace of its own first, and so do the threads that it starts: the
    mount ends with the process, even if that is killed, and no other process ever sees it.

    Raises:
        ConfigError: this user, or this kernel, may not.
    """
    options = f"size={size},huge=advise,mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if (
        _libc.unshare(_CLONE_NEWNS)
        or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or _libc.mount(b"kvray-bench", bytes(directory), b"tmpfs", flags, options)
    ):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"No tmpfs with huge pages can be mounted here ({reason}); have root mount one, and"
            " name it with --arena-dir."
        )


def unmount(directory: Path) -> None:
    """Take the mount away; memory that is still mapped stays until it is unmapped."""
    _libc.umount2(bytes(directory), _MNT_DETACH)


def _refusal(directory: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return ConfigError(
            f"The file system of {directory} takes no direct I/O, so there is no floor to measure"
            " beside; give a directory on a disk with --dir."
        )
    return ConfigError(
        f"The bench cannot write its files in {directory} ({error.strerror}); give another"
        " directory with --dir."
    )
