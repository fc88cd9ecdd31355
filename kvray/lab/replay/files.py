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

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 64 * 1024
_LINES_PER_REPORT = 256

Progress = Callable[[int, int], None]
"""Takes the bytes of the file that are read, and all of them."""


class TraceFile:
    """A file that is read from its beginning to its end, and unpacked on the way."""

    def __init__(self, path: Path, raw: BinaryIO, progress: Progress) -> None:
        """Read `raw`, the opened `path`."""
        self.path = path
        num_bytes = path.stat().st_size
        self._report: Callable[[], None] = lambda: progress(raw.tell(), num_bytes)
        self.stream = _unpacked(raw)
        self.head = self.stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        """The first bytes of its content."""

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
                    self._report()

    def lines(self) -> Iterator[bytes]:
        """Return each line."""
        for number, line in enumerate(self.stream):
            if number % _LINES_PER_REPORT == 0:
                self._report()
            yield line
        self._report()


@contextlib.contextmanager
def opened(path: Path, progress: Progress) -> Iterator[TraceFile]:
    """Open a file for the block.

    Raises:
        ConfigError: it cannot be read, or its archive is damaged, also later in the block.
    """
    try:
        with path.open("rb") as raw:
            yield TraceFile(path, raw, progress)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(
            f"{path} is cut short or damaged ({str(error).rstrip('.')}); get the file again."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None


def _unpacked(raw: BinaryIO) -> io.BufferedReader:
    magic = cast(io.BufferedReader, raw).peek(len(_XZ))
    unpacked: object = raw
    if magic.startswith(_GZIP):
        unpacked = gzip.GzipFile(fileobj=raw)
    elif magic.startswith(_XZ):
        unpacked = lzma.LZMAFile(raw)  # noqa: SIM115 - closes with `raw`
    return io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_HEAD_BYTES)
