"""The files that traces come in: plain, compressed, or archives of many."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from kvray.errors import ConfigError

GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 64 * 1024

Progress = Callable[[int, int], None]
"""Is called with the bytes of the file that are read, and all of them."""


class TraceFile:
    """A file that is read from its beginning to its end, unpacked on the way."""

    def __init__(self, path: Path, raw: BinaryIO, progress: Progress) -> None:
        """Read `raw`, the opened `path`."""
        self.path = path
        self._raw = raw
        self._num_bytes = path.stat().st_size
        self._progress = progress
        self.stream = _unpacked(raw)
        self.head = self.stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        """The first bytes of what it holds."""

    @property
    def is_archive(self) -> bool:
        """Whether it holds files."""
        return self.head[_TAR_AT:].startswith(_TAR)

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Return name and content of each file in the archive."""
        with tarfile.open(fileobj=self.stream, mode="r|") as archive:
            for member in archive:
                if (file := archive.extractfile(member)) is not None:
                    yield f"{self.path}: {member.name}", file.read()
                    self.report()

    def lines(self) -> Iterator[bytes]:
        """Return each line."""
        for number, line in enumerate(self.stream):
            if number % 256 == 0:
                self.report()
            yield line
        self.report()

    def report(self) -> None:
        """Say how far it is read."""
        self._progress(self._raw.tell(), self._num_bytes)


@contextlib.contextmanager
def opened(path: Path, progress: Progress) -> Iterator[TraceFile]:
    """Open a file for the block.

    Raises:
        ConfigError: it cannot be read, or its archive is damaged, also later in the block.
    """
    try:
        with path.open("rb") as raw:
            yield TraceFile(path, raw, progress)
    except OSError as error:
        if not isinstance(error, gzip.BadGzipFile):
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
        raise _damaged(path, error) from None
    except (EOFError, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise _damaged(path, error) from None


def _unpacked(raw: BinaryIO) -> io.BufferedReader:
    magic = cast(io.BufferedReader, raw).peek(len(XZ))
    unpacked: object = raw
    if magic.startswith(GZIP):
        unpacked = gzip.GzipFile(fileobj=raw)
    elif magic.startswith(XZ):
        unpacked = lzma.LZMAFile(raw)  # noqa: SIM115 - it has nothing to close but `raw`
    return io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_HEAD_BYTES)


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is cut short or damaged ({str(error).rstrip('.')}); get the file again."
    )
