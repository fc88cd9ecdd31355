"""The fingerprint of a checkpoint: the name of the model in a namespace when nobody gave one.

Two checkpoints share a fingerprint only if every byte of their weights and of their configuration
is equal. Their place, times and links play no part. The fingerprint is the sha256 of framed items:
a format tag, then for each file, in order of name, its name (its path below the checkpoint) and the
sha256 of its content.

Why sha256, which is no faster than a disk: a hub's cache names large files by it. So a downloaded
file has its digest without being read, and the same digest as its copy elsewhere. A digest from the
hub or the cache gives the same fingerprint sooner, never another one.

Processes take turns to read a checkpoint, so that one reading serves all of a node.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvray.errors import ConfigError
from kvray.identity.block import frame

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".engine", ".plan", ".nemo", ".npz")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
"""Files of trainers beside the weights, which no engine loads."""
_CONFIGS = (".json", ".yaml", ".yml", ".py")
"""Settings of the model, its quantisation and its media processors, the list of tensors by file,
and the code of models that bring their own."""
_NOT_CONFIGS = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken|chat_template"
    r"|generation_config|trainer_state|.*_results)\.json"
)
"""Files that make token ids, which the keys contain, or choose among them; and trainers' notes."""
_NOT_PARTS = re.compile(r"\..*|__pycache__|original|lost\+found|(checkpoint|global_step)-?\d+")
"""Directories that no engine reads: other states, and the weights once more."""
_DEPTH_MAX = 3
_PIECE = re.compile(r".*-\d+-of-\d+\.\w+|rank\d+\.engine")


@dataclass(slots=True)
class Progress:
    """How far the reading of a checkpoint is; may be read from any thread."""

    done_bytes: int = 0
    total_bytes: int = 0
    on_step: Callable[[], None] = lambda: None
    """Called often, by each thread that reads or waits; an exception in it ends the reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A file of a checkpoint, with all that changes when its content does."""

    name: bytes
    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    is_weights: bool

    @property
    def identity(self) -> str:
        """Numbers that change when the file is written or replaced."""
        numbers = (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns)
        return ":".join(map(str, numbers))


class Changed(Exception):
    """A file was written or replaced after it was found."""


def find_files(root: Path) -> list[CheckpointFile]:
    """Return weight and configuration files of `root`, by name; a single file has no name."""
    try:
        if root.is_dir():
            found = list(_walk(root, b"", _DEPTH_MAX))
        else:
            _check_single(root)
            file = file_of(root.stat(), root, b"")
            found = [file] if file is not None and file.is_weights else []
    except OSError as error:
        raise unreadable(error, root) from None
    if not any(file.is_weights for file in found):
        raise ConfigError(
            f"{root} holds no weight files ({', '.join(_WEIGHTS)}); name the directory that does,"
            " or give connector.model_key."
        )
    return sorted(found, key=lambda file: file.name)


def _walk(directory: Path, prefix: bytes, depth: int) -> Iterator[CheckpointFile]:
    """Yield the files of a directory that are part of a model; its own directories likewise."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + os.fsencode(entry.name)
            if entry.is_dir():
                if depth and not _NOT_PARTS.fullmatch(entry.name):
                    yield from _walk(directory / entry.name, name + b"/", depth - 1)
            elif _is_part(entry.name):
                path = directory / entry.name
                file = file_of(path.stat(), path, name)
                if file is not None:
                    yield file


def _check_single(path: Path) -> None:
    if not path.exists():
        raise ConfigError(
            f"There is no checkpoint at {path}; download it first, or give connector.model_key."
        )
    if _PIECE.fullmatch(path.name):
        raise ConfigError(f"{path} is one piece of a checkpoint; name its directory.")


def _is_part(name: str) -> bool:
    is_config = name.endswith(_CONFIGS) and not _NOT_CONFIGS.fullmatch(name)
    return (is_config and not name.startswith(".")) or _is_weights(name)


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) and not _NOT_WEIGHTS.fullmatch(name)


def file_of(status: os.stat_result, path: Path, name: bytes) -> CheckpointFile | None:
    """Return the file that `status` describes; None if it is no plain file."""
    if not stat.S_ISREG(status.st_mode):
        return None
    return CheckpointFile(
        name=name,
        path=path,
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        is_weights=_is_weights(path.name),
    )


def unreadable(error: OSError, root: Path) -> ConfigError:
    """Return the error for a checkpoint at `root` that cannot be read."""
    return ConfigError(
        f"{error.filename or root} cannot be read ({error.strerror}); complete the checkpoint and"
        " allow this user to read it, or give connector.model_key."
    )


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
