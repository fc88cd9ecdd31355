"""Files past the page cache, memory for them, and directories that survive a power loss.

Only this module of the NVMe tier calls the operating system. Tests replace `Disk` by one that notes
every write and sync, or fails some.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvray.errors import CapacityError, TierError
from kvray.store.arena.layout import Array
from kvray.store.machine.access import OWN_USER, Access
from kvray.store.nvme.record import PAGE_BYTES

_log = logging.getLogger("kvray.nvme")

BUFFERS_MAX = 1024  # IOV_MAX of Linux: pieces of memory that one call reads or writes

_Call = Callable[[int, list[memoryview], int], int]

_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python names from 3.11 on: most tables are never touched."""

_PROBE_FILE = "probe"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def private(size: int) -> mmap.mmap:
    """Return zero bytes on pages of this process alone, which cost nothing until they are used."""
    # Private: a forked child must not write into its parent's tables.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


def aligned(size: int) -> Array:
    """Return `size` zero bytes, page-aligned for direct I/O."""
    return np.frombuffer(private(size), dtype="u1", count=size)


class DiskFile:
    """One open file, from `Disk.open` or `Disk.create`; several threads may use it at once."""

    def __init__(self, path: Path, fd: int, disk: "Disk") -> None:
        self.path = path
        self._fd = fd
        self._disk = disk

    def write(self, buffers: Sequence[Array], offset: int) -> None:
        """Write up to BUFFERS_MAX buffers, page-aligned whole pages, from byte `offset` on.

        CapacityError: the file system is full. TierError: the device failed.
        """
        with device_errors(self.path, "written"):
            self._transfer(os.pwritev, buffers, offset)

    def read(self, buffers: Sequence[Array], offset: int) -> None:
        """Fill `buffers` from byte `offset` on; TierError also if the file ends before."""
        with device_errors(self.path, "read"):
            self._transfer(os.preadv, buffers, offset)
            if not self._disk.is_direct:
                length = sum(one.nbytes for one in buffers)
                # The blocks lie in the arena now: a second copy would only cost memory.
                os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Return when all earlier writes survive a power loss."""
        with device_errors(self.path, "written"):
            os.fdatasync(self._fd)
            if not self._disk.is_direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def allocate(self, size: int) -> None:
        """Give the file `size` bytes, the new ones zero; it never shrinks."""
        with device_errors(self.path, "made"):
            os.posix_fallocate(self._fd, 0, size)

    def size(self) -> int:
        """Return the bytes of the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _transfer(self, call: _Call, buffers: Sequence[Array], offset: int) -> None:
        views = [one.data.cast("B") for one in buffers]
        while views:
            try:
                done = call(self._fd, views, offset)
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # Some file systems refuse only at the first transfer.
                self._disk.give_up_direct(self.path)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if not done:
                raise TierError(
                    f"{self.path} ends at byte {offset}, before the blocks that it should hold;"
                    " something has cut it short. Restart the tier to go on with what is left."
                )
            offset += done
            views = _after(views, done)


class Disk:
    """Opens and names files; logs once if they must go through the page cache."""

    def __init__(self, access: Access = OWN_USER) -> None:
        self._access = access
        self.is_direct = True  # whether transfers go past the page cache

    def open(self, path: Path) -> DiskFile:
        """Open an existing file for reading and writing."""
        file = self._open(path, os.O_RDWR)
        try:
            with device_errors(path, "opened"):
                self._access.give(path)  # an earlier owner may have let in somebody else
        except BaseException:
            file.close()
            raise
        return file

    def create(self, path: Path, size: int) -> DiskFile:
        """Make a file of `size` zero bytes, with all its room allocated; or leave nothing of it."""
        file = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with device_errors(path, "made"):
                self._access.give(path)
            file.allocate(size)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return file

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; durable once the directory is synced."""
        with device_errors(source, "renamed"):
            os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Take a file's name away; open descriptors stay usable."""
        with device_errors(path, "removed"):
            os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        """Return when the names in `directory` survive a power loss."""
        with device_errors(directory, "written"):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def check_writable(self, directory: Path) -> None:
        """Write a page to a new file in `directory` and remove it; a full disk is no error."""
        path = directory / _PROBE_FILE
        with contextlib.suppress(CapacityError):
            with device_errors(path, "removed"):
                path.unlink(missing_ok=True)  # of a process that ended here
            with contextlib.closing(self.create(path, PAGE_BYTES)) as file:
                file.write([aligned(PAGE_BYTES)], 0)
                file.sync()
        with device_errors(path, "removed"):
            path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        """Return the bytes that this user can still write to the file system of `directory`."""
        with device_errors(directory, "looked at"):
            stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize

    def give_up_direct(self, path: Path) -> None:
        """Use the page cache from now on, as the file system of `path` refuses direct I/O."""
        if self.is_direct:
            self.is_direct = False
            _log.warning(
                "%s: its file system takes no direct I/O, so blocks go through the page cache,"
                " which costs CPU and memory; choose another directory for the NVMe tier",
                path,
            )

    def _open(self, path: Path, flags: int) -> DiskFile:
        flags |= os.O_CLOEXEC
        with device_errors(path, "opened"):
            if self.is_direct:
                try:
                    return DiskFile(path, os.open(path, flags | os.O_DIRECT, 0o600), self)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                self.give_up_direct(path)
                # Some file systems have made the file before they refuse.
                flags &= ~os.O_EXCL
            return DiskFile(path, os.open(path, flags, 0o600), self)


@contextlib.contextmanager
def device_errors(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the operating system into ours, with a sentence that says what to do.

    Raises:
        CapacityError: the file system is full.
        TierError: anything else.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            raise CapacityError(
                f"{path} cannot be {what} ({reason}); free room on its file system, or lower"
                " nvme.capacity."
            ) from None
        raise TierError(
            f"{path} cannot be {what} ({reason}); look at the device with `dmesg`, or choose"
            " another directory for the NVMe tier."
        ) from None


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []
