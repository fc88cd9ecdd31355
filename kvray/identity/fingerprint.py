"""The fingerprint of a checkpoint: the name of the model in a namespace when nobody gave one.

Two checkpoints share a fingerprint only if every byte of their weights and of their configuration
is equal. Their place, times and links play no part. The fingerprint is the sha256 of framed items:
a format tag, then for each file, in order of name, its name (its path below the checkpoint) and the
sha256 of its content.

Why sha256, which is no faster than a disk: a hub's cache names large files by it. So a downloaded
file has its digest without being read, and the same digest as its copy elsewhere. A digest from the
hub or the cache gives the same fingerprint sooner, never another one.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.checkpoint import (
    Changed,
    CheckpointFile,
    Progress,
    file_of,
    find_files,
    unreadable,
)
from kvray.identity.digest_cache import DigestCache, named_by_hub

FORMAT_TAG = b"kvray.fingerprint.2"
READERS_MAX = 8
"""Threads that read one checkpoint, each a file at a time."""

_READ_BYTES = 4 * 2**20
_ALONE_BYTES_MAX = 32 * 2**20
"""The caller's thread reads this much alone: quicker than starting other threads."""
_NICENESS = 10
_TICK_NS = 20_000_000
"""Longer than the step of the clock that stamps files (10 ms on a kernel with HZ=100)."""
_KEEP_S = 1.0
"""How often known digests are written down, and others hear of the progress."""


def fingerprint_model(
    path: str | Path, *, cache_dir: Path | None, progress: Progress | None = None
) -> str:
    """Return 64 hex digits that name the checkpoint or LoRA adapter at `path`, and no other one.

    `path` is a directory or one weight file. If several processes need one checkpoint, one reads it
    and the others wait. `cache_dir` keeps digests; each counts only while its file is the same.
    None, or one that cannot be used: none kept. An exception of `progress.on_step` ends the
    reading.

    Raises:
        ConfigError: there is nothing at `path`, it holds no weights, or files change while they are
            read.

    Source: TensorRT-LLM's Hugging Face weight loader takes `*.safetensors`, `*.bin` and `*.pth`
    from the directory itself; some models (VILA) have theirs in directories inside it.
    """
    root, progress = Path(path), progress or Progress()
    memory = DigestCache(root, cache_dir)
    for _attempt in range(2):
        files = find_files(root)
        try:
            digests = _digests(files, memory, progress)
        except (Changed, FileNotFoundError):
            continue
        except OSError as error:
            raise unreadable(error, root) from None
        if find_files(root) == files:
            items = [item for file in files for item in (file.name, digests[file])]
            return hashlib.sha256(frame(FORMAT_TAG, *items)).hexdigest()
    raise ConfigError(
        f"The files of {root} change while they are read; wait until the checkpoint is complete"
        " and start again."
    )


def stamp_model(path: str | Path) -> str:
    """Return a stamp that changes whenever the fingerprint of the checkpoint at `path` could.

    It covers the places and times of files and reads none of them: microseconds a file. Compare it
    with a stamp from before the fingerprint: `fingerprint_model` waits until later changes show in
    a file's times. It raises ConfigError as `fingerprint_model` does.
    """
    digest = hashlib.sha256(FORMAT_TAG)
    for file in find_files(Path(path)):
        digest.update(frame(file.name, file.identity.encode()))
    return digest.hexdigest()


def _digests(
    files: list[CheckpointFile], memory: DigestCache, progress: Progress
) -> dict[CheckpointFile, bytes]:
    """Return the sha256 of each file's content; raises Changed, or OSError for unreadable ones."""
    named = {file: digest for file in files if (digest := named_by_hub(file)) is not None}
    known = memory.recall(files) | named
    if len(known) < len(files):
        with memory.turn(progress) as announce:
            known = memory.recall(files) | named  # another process may have read them meanwhile
            missing = [file for file in files if file not in known]
            if missing:
                _wait_for_tick(missing)
                try:
                    _Reading(missing, known, memory, progress, announce).finish()
                finally:
                    memory.keep(dict(known))  # after an error too: the next one goes on
    return known


def _wait_for_tick(files: list[CheckpointFile]) -> None:
    """Wait until any later change of content gets a new time of change.

    A file written twice within one step of the clock keeps its times. Without the wait the second
    content would pass for the first one, now and from the cache.
    """
    age_ns = time.time_ns() - max(file.ctime_ns for file in files)
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)


class _Reading:
    """The reading of one checkpoint's files.

    Threads share, under `_lock`: the files that are left, the digests found, and the progress.
    """

    def __init__(
        self,
        files: list[CheckpointFile],
        found: dict[CheckpointFile, bytes],
        memory: DigestCache,
        progress: Progress,
        announce: Callable[[Progress], None],
    ) -> None:
        # The largest first, so that no thread is left with one at the end.
        self._left = sorted(files, key=lambda file: file.size)
        self._found = found
        self._memory = memory
        self._progress = progress
        self._announce = announce
        self._keep_at = time.monotonic() + _KEEP_S
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        progress.done_bytes, progress.total_bytes = 0, sum(file.size for file in files)

    def finish(self) -> None:
        """Read all files into `found`."""
        if self._progress.total_bytes <= _ALONE_BYTES_MAX:
            self._read_files()
        else:
            count = min(READERS_MAX, len(self._left), len(os.sched_getaffinity(0)))
            readers = [
                threading.Thread(target=self._read_beside, name="kvray-fingerprint", daemon=True)
                for _ in range(count)
            ]
            try:
                for reader in readers:
                    reader.start()
                for reader in readers:
                    reader.join()
            except BaseException as error:
                self._failure = error  # Ctrl-C or no more threads: nobody waits for the readers now
                raise
        if self._failure is not None:
            raise self._failure

    def _read_beside(self) -> None:
        """Read with the lowest claim on the machine: engines load meanwhile."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._read_files()

    def _read_files(self) -> None:
        buffer = bytearray(_READ_BYTES)
        try:
            while (file := self._next()) is not None:
                digest = self._hash(file, buffer)
                with self._lock:
                    self._found[file] = digest
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, whatever it is
            with self._lock:
                self._failure = error

    def _next(self) -> CheckpointFile | None:
        with self._lock:
            return self._left.pop() if self._left and self._failure is None else None

    def _hash(self, file: CheckpointFile, buffer: bytearray) -> bytes:
        """Return the digest of a file that did not change meanwhile."""
        digest = hashlib.sha256()
        # Non-blocking: a pipe may have taken the name, and must not be waited for.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._check(file, descriptor)
            for piece in _pieces(descriptor, file.size, buffer):
                digest.update(piece)
                self._advance(len(piece))
            self._check(file, descriptor)
        finally:
            os.close(descriptor)
        return digest.digest()

    def _check(self, file: CheckpointFile, descriptor: int) -> None:
        if file_of(os.fstat(descriptor), file.path, file.name) != file:
            raise Changed

    def _advance(self, size: int) -> None:
        self._progress.on_step()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._progress.done_bytes += size
            if time.monotonic() < self._keep_at:
                return
            self._keep_at = time.monotonic() + _KEEP_S
            found = dict(self._found)
        self._announce(self._progress)
        self._memory.keep(found)


def _pieces(descriptor: int, size: int, buffer: bytearray) -> Iterator[memoryview]:
    """Yield the content of a file piece by piece; each is gone with the next."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    view, offset = memoryview(buffer), 0
    while offset < size:
        piece = view[: os.preadv(descriptor, [view], offset)]
        if not piece:
            raise Changed
        yield piece
        offset += len(piece)
