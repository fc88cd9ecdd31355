"""Digests of checkpoint files that need no reading; processes take turns to read the others."""

import fcntl
import hashlib
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvray.identity.checkpoint import CheckpointFile, Progress

_ENTRY_BYTES_MAX = 16 * 2**20
_POLL_S = 0.1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ANNOUNCED = struct.Struct("<QQ")
_STALL_S = 30.0
"""A process waits so long for another one that makes no progress, then reads for itself."""


def named_by_hub(file: CheckpointFile) -> bytes | None:
    """Return the digest by which a hub's cache names a file, if it can be trusted.

    The cache has `snapshots/<revision>/<name>`, a link to `blobs/<sha256>`, made once the file is
    there and named. A file that was written, replaced or restored after any of its links was made
    is read instead: somebody may have edited it in place.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache; names of 40 digits, of
    small files, are another hash.
    """
    blob = Path(os.path.realpath(file.path))
    if not _DIGEST.fullmatch(blob.name) or blob.parent.name != "blobs":
        return None
    place = Path(os.path.realpath(file.path.parent), file.path.name)
    snapshots = blob.parent.parent / "snapshots"
    if snapshots not in place.parents:
        return None
    _, *below = place.relative_to(snapshots).parts
    links = [revision.joinpath(*below) for revision in snapshots.iterdir()]
    made = [os.lstat(link) for link in links if os.path.realpath(link) == str(blob)]
    is_older = all(
        file.mtime_ns <= link.st_mtime_ns and file.ctime_ns <= link.st_ctime_ns for link in made
    )
    return bytes.fromhex(blob.name) if made and is_older else None


class DigestCache:
    """Digests of earlier readings; each counts while its file is the same."""

    def __init__(self, root: Path, cache_dir: Path | None) -> None:
        digest = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()
        self._path = None if cache_dir is None else cache_dir / f"fingerprint-{digest}.json"

    def recall(self, files: list[CheckpointFile]) -> dict[CheckpointFile, bytes]:
        """Return the digests known of `files`; a damaged cache knows none."""
        try:
            if self._path is None:
                return {}
            with self._path.open("rb") as opened:
                kept = json.loads(opened.read(_ENTRY_BYTES_MAX))
            digests = kept["sha256"]
            if kept["check"] != _check_of(digests):
                return {}
            found = ((file, digests.get(file.identity)) for file in files)
            return {file: bytes.fromhex(digest) for file, digest in found if digest is not None}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def keep(self, digests: Mapping[CheckpointFile, bytes]) -> None:
        """Keep `digests`, readable for this user only; without write access, keep none."""
        if self._path is None:
            return
        found = {file.identity: digest.hex() for file, digest in digests.items()}
        kept = {"sha256": found, "check": _check_of(found)}
        try:
            descriptor, name = tempfile.mkstemp(
                prefix=f".{self._path.name}.", dir=self._path.parent
            )
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as opened:
                json.dump(kept, opened)
            os.replace(name, self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)

    @contextmanager
    def turn(self, progress: Progress) -> Iterator[Callable[[Progress], None]]:
        """Wait until no other process reads the checkpoint; yield a function that reports progress.

        The kernel ends a turn with its process. Nobody waits for a process without progress, nor
        for a cache that cannot be used or locked: then several read one checkpoint, which costs
        only time.
        """
        descriptor = self._open_lock()
        try:
            if descriptor is not None:
                _wait_for_turn(descriptor, progress)
            yield lambda own: _announce(descriptor, own)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_lock(self) -> int | None:
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return None


def _check_of(digests: object) -> str:
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _wait_for_turn(descriptor: int, progress: Progress) -> None:
    said, until = b"", time.monotonic() + _STALL_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            saying = os.pread(descriptor, _ANNOUNCED.size, 0)
        except OSError:
            return  # this file system has no locks
        if saying != said and len(saying) == _ANNOUNCED.size:
            said, until = saying, time.monotonic() + _STALL_S
            progress.done_bytes, progress.total_bytes = _ANNOUNCED.unpack(saying)
        elif time.monotonic() >= until:
            return
        progress.on_step()
        time.sleep(_POLL_S)


def _announce(descriptor: int | None, progress: Progress) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.pwrite(descriptor, _ANNOUNCED.pack(progress.done_bytes, progress.total_bytes), 0)
