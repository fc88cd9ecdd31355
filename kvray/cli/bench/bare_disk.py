"""The floor of `kvray bench nvme`: bytes between memory and a file past the page cache, no more."""

import ctypes
import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvray.cli.bench.pairs import Timing
from kvray.config import format_size
from kvray.errors import ConfigError, KVRayError
from kvray.store.mounts import mount_of
from kvray.store.nvme.io_threads import IoThreads
from kvray.store.tables import Array

_TRIES = 3
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_Call = Callable[[int, list[memoryview], int], int]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the floor moves its bytes."""

    transfer_bytes: int
    num_threads: int

    def __str__(self) -> str:
        """Return it as people write it."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{format_size(self.transfer_bytes)} by {threads}"


SETTINGS = tuple(
    Setting(transfer_bytes=mib * 2**20, num_threads=num_threads)
    for mib, num_threads in ((4, 2), (4, 4), (16, 1), (16, 4), (64, 1), (64, 2), (256, 1))
)
"""What is tried for the floor: from some transfers under way to one that is as large as can be."""


class BareDisk:
    """A file as large as `memory`, which is written to it and read from it, one byte to one."""

    def __init__(self, path: Path, memory: Array) -> None:
        """Have no file yet; `memory` is on the boundary of a page and has whole pages."""
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

    def store(self, setting: Setting) -> Timing:
        """Write all of the memory to the file, for good."""

        def work() -> None:
            self._move(os.pwritev, setting)
            os.fdatasync(self._fd)

        return timed(work)

    def retrieve(self, setting: Setting) -> Timing:
        """Read all of the file into the memory."""
        return timed(lambda: self._move(os.preadv, setting))

    def close(self) -> None:
        """Remove the file and end the threads. Twice is fine."""
        for threads in self._threads.values():
            threads.close()
        self._threads.clear()
        self._drop()

    def _move(self, call: _Call, setting: Setting) -> None:
        threads = self._threads.setdefault(setting.num_threads, IoThreads(setting.num_threads))
        starts = range(0, self._memory.nbytes, setting.transfer_bytes)
        threads.run([partial(self._move_one, call, at, setting.transfer_bytes) for at in starts])

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


def timed(work: Callable[[], object]) -> Timing:
    """Do `work` and time it; the CPU is that of all threads of this process."""
    cpu_s, began = time.process_time(), time.perf_counter()
    work()
    return Timing(seconds=time.perf_counter() - began, cpu_s=time.process_time() - cpu_s)


def best_settings(
    disk: BareDisk, *, memory_bytes: int, tries: int = _TRIES
) -> tuple[Setting, Setting]:
    """Return with which settings stores and retrieves are fastest here, by their medians."""
    settings = [one for one in SETTINGS if one.transfer_bytes <= memory_bytes] or [
        Setting(transfer_bytes=memory_bytes, num_threads=1)
    ]
    stores: dict[Setting, list[float]] = {one: [] for one in settings}
    retrieves: dict[Setting, list[float]] = {one: [] for one in settings}
    for _ in range(tries):
        for one in settings:
            disk.renew()
            stores[one].append(disk.store(one).seconds)
            retrieves[one].append(disk.retrieve(one).seconds)
    return _fastest(stores), _fastest(retrieves)


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
    """Put files out of the page cache, and make sure that nothing of them is left there.

    Raises:
        KVRayError: something is, so that a retrieve would not be from the disk.
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
                f"{format_size(resident)} of {path} are still in the page cache, so that what is"
                " read would not come from the disk; end what else uses that file system."
            )


def resident_bytes(fd: int) -> int:
    """Return how much of a file the page cache has; it is open for reading and writing."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype="u1")
    with mmap.mmap(fd, size) as mapping:
        # A view that is let go, or the mapping could not be closed.
        address = np.frombuffer(mapping, dtype="u1", count=1).ctypes.data
        if _libc.mincore(address, size, pages.ctypes.data):
            code = ctypes.get_errno()
            raise KVRayError(f"The page cache cannot be looked at ({os.strerror(code)}).")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


def _fastest(seconds: dict[Setting, list[float]]) -> Setting:
    return min(seconds, key=lambda one: statistics.median(seconds[one]))


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
