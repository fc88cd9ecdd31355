"""The fingerprint of a checkpoint: what a namespace calls the model when nobody named it.

Two checkpoints share a fingerprint only if they hold the same weights and configuration; where
they lie, when they were written and how they are linked plays no part. It is the sha256 of framed
items: a format tag, then for each file in order of name its name, its size, the number of regions
taken from it, and each region's offset, length and bytes. A file is one region, all of it, if it is
a configuration or the weights come to `WHOLE_BYTES_MAX` at most. The regions of larger weights are
the first and last chunk of each file, chunks at a stride that all files share, the head of a GGUF
file, and of a safetensors file the header and some bytes from the middle of each tensor.
"""

import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import NamedTuple

from kvray.block import frame
from kvray.errors import ConfigError

FORMAT_TAG = b"kvray.fingerprint.1"
WHOLE_BYTES_MAX = 2**30
CHUNK_BYTES = 2**16
CHUNKS_MAX = 1024
"""Chunks at the shared stride, over all weight files; each file's first and last come on top."""
TENSOR_BYTES = 256
TENSORS_MAX = 2**14
"""Tensors sampled over all weight files; of more than these, evenly many are left out."""
GGUF_HEAD_BYTES = 2**24
"""First bytes of a GGUF file: its metadata and, behind the vocabulary, its table of tensors."""
HEADER_BYTES_MAX = 10**8
"""Longest header that the safetensors format allows."""

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".engine", ".nemo")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
"""What trainers leave beside the weights and no engine loads."""
_CONFIGS = {
    "config.json",
    "params.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "quant_cfg.json",
    "quantize_config.json",
    "quantization_config.json",
}
_CONFIG_SUFFIXES = (".index.json", ".py")
"""Which tensor is taken from which file, and the code of models that bring their own."""
_PIECE = re.compile(r".*-\d+-of-\d+\.\w+|rank\d+\.engine")
_READ_BYTES = 2**20
_TICK_NS = 20_000_000
"""Longer than the step of the clock that stamps files (10 ms on a kernel with HZ=100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of a checkpoint and all that tells when it is no longer the same one."""

    name: bytes
    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    is_weights: bool


class _Region(NamedTuple):
    offset: int
    size: int


def fingerprint_model(path: str | Path, *, cache_dir: Path | None) -> str:
    """Return what tells the checkpoint or LoRA adapter at `path` from every other one.

    Args:
        path: a directory that holds weight files and their configuration, or one weight file.
            Links are followed; directories inside it are not looked into.
        cache_dir: where results are kept as one small file per path, made when missing; they
            count only while every file is the same. None, or one that cannot be used: none kept.

    Returns:
        64 hexadecimal digits.

    Raises:
        ConfigError: there is nothing at `path`, it holds no weights or damaged ones, or files
            change while they are read.

    Source: what engines read of a checkpoint: TensorRT-LLM's Hugging Face weight loader takes
    `*.safetensors`, `*.bin` and `*.pth` from the directory itself.
    """
    root = Path(path)
    entry = _entry_path(root, cache_dir) if cache_dir else None
    for _attempt in range(2):
        files = _find_files(root)
        if entry and (known := _read_entry(entry, files)):
            return known
        _wait_for_tick(files)
        try:
            fingerprint = _hash_files(files)
        except (EOFError, FileNotFoundError):
            continue
        except OSError as error:
            raise _unreadable(error, root) from None
        if _find_files(root) == files:
            if entry:
                _write_entry(entry, files, fingerprint)
            return fingerprint
    raise ConfigError(
        f"The files of {root} change while they are read; wait until the checkpoint is complete"
        " and start again."
    )


def stamp_model(path: str | Path) -> str:
    """Return what changes whenever the fingerprint of the checkpoint or adapter at `path` could.

    It tells files by place and times and reads none of them, so it costs microseconds a file.
    Compare it with one that was taken before the fingerprint: `fingerprint_model` waits until
    later changes show in a file's times.

    Raises:
        ConfigError: there is nothing at `path`, or it holds no weights.
    """
    return _identity(_find_files(Path(path)))


def _find_files(root: Path) -> list[_File]:
    """Return weight and configuration files of `root`, by name; a single file has no name."""
    try:
        if root.is_dir():
            names = filter(_is_part, os.listdir(root))
            found = [file for name in names if (file := _identify(root / name, name))]
        else:
            _check_single(root)
            found = [file for file in [_identify(root, "")] if file and file.is_weights]
    except OSError as error:
        raise _unreadable(error, root) from None
    if not any(file.is_weights for file in found):
        raise ConfigError(
            f"{root} holds no weight files ({', '.join(_WEIGHTS)}); name the directory that does,"
            " or give connector.model_key."
        )
    return sorted(found, key=lambda file: file.name)


def _check_single(path: Path) -> None:
    if not path.exists():
        raise ConfigError(
            f"There is no checkpoint at {path}; download it first, or give connector.model_key."
        )
    if _PIECE.fullmatch(path.name):
        raise ConfigError(f"{path} is one piece of a checkpoint; name its directory.")


def _is_part(name: str) -> bool:
    """Return whether a file of this name is part of a model."""
    return _is_weights(name) or name in _CONFIGS or name.endswith(_CONFIG_SUFFIXES)


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) and not _NOT_WEIGHTS.fullmatch(name)


def _identify(path: Path, name: str) -> _File | None:
    """Return the file at `path`, None if it is none."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        return None
    return _File(
        name=os.fsencode(name),
        path=path,
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        is_weights=_is_weights(path.name),
    )


def _unreadable(error: OSError, root: Path) -> ConfigError:
    return ConfigError(
        f"{error.filename or root} cannot be read ({error.strerror}); complete the checkpoint and"
        " allow this user to read it, or give connector.model_key."
    )


def _wait_for_tick(files: list[_File]) -> None:
    """Wait until a change of content must show as a new time of change.

    A file written twice within one step of the clock keeps its times: without the wait, the
    second content would be taken for the first one, now and from the cache.
    """
    age_ns = time.time_ns() - max(file.ctime_ns for file in files)
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)


def _hash_files(files: list[_File]) -> str:
    weights = [file for file in files if file.is_weights]
    total = sum(file.size for file in weights)
    regions = {} if total <= WHOLE_BYTES_MAX else _sample(weights, total)
    digest = hashlib.sha256(frame(FORMAT_TAG))
    for file in files:
        taken = regions.get(file, [_Region(0, file.size)])
        digest.update(frame(file.name, struct.pack("<QQ", file.size, len(taken))))
        with file.path.open("rb", buffering=0) as opened:
            if file in regions:
                # Without this the kernel reads 128 KiB ahead of each 256 bytes.
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for region in taken:
                _hash_region(digest, opened.fileno(), region)
    return digest.hexdigest()


def _hash_region(digest: "hashlib._Hash", descriptor: int, region: _Region) -> None:
    digest.update(struct.pack("<QQ", *region))
    offset, left = region
    while left:
        data = os.pread(descriptor, min(left, _READ_BYTES), offset)
        if not data:
            raise EOFError(f"{region} ends behind its file")
        digest.update(data)
        offset, left = offset + len(data), left - len(data)


def _sample(weights: list[_File], total: int) -> dict[_File, list[_Region]]:
    """Return the regions to read of each file, in order of offset."""
    chunk_stride = max(-(-total // CHUNKS_MAX), CHUNK_BYTES)
    headers = {file: _read_header(file) for file in weights if file.path.suffix == ".safetensors"}
    num_tensors = sum(len(tensors) for _, tensors in headers.values())
    tensor_stride = max(-(-num_tensors // TENSORS_MAX), 1)
    sampled = {}
    for file in weights:
        regions = set(_chunks(file.size, chunk_stride))
        if file.path.suffix == ".gguf":
            regions.add(_Region(0, min(file.size, GGUF_HEAD_BYTES)))
        if file in headers:
            head, tensors = headers[file]
            regions |= {head, *(_middle(tensor) for tensor in tensors[::tensor_stride])}
        sampled[file] = sorted(regions)
    return sampled


def _chunks(size: int, stride: int) -> Iterator[_Region]:
    for offset in [*range(0, size, stride), max(size - CHUNK_BYTES, 0)]:
        yield _Region(offset, min(CHUNK_BYTES, size - offset))


def _middle(tensor: _Region) -> _Region:
    size = min(tensor.size, TENSOR_BYTES)
    return _Region(tensor.offset + (tensor.size - size) // 2, size)


def _read_header(file: _File) -> tuple[_Region, list[_Region]]:
    """Return where the header of a safetensors file lies and where its tensors lie.

    Source: https://github.com/huggingface/safetensors#format: u64 length, that much JSON, data.
    """
    with file.path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if 8 + length > file.size or length > HEADER_BYTES_MAX:
            raise _damaged(file)
        text = opened.read(length)
    try:
        spans = [
            tensor["data_offsets"]
            for name, tensor in json.loads(text).items()
            if name != "__metadata__"
        ]
        tensors = sorted(_Region(8 + length + index(a), index(b) - index(a)) for a, b in spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(file) from None
    if any(t.offset < 8 + length or t.size < 0 or sum(t) > file.size for t in tensors):
        raise _damaged(file)
    return _Region(0, 8 + length), tensors


def _damaged(file: _File) -> ConfigError:
    return ConfigError(f"{file.path} is no complete safetensors file; download it again.")


def _entry_path(root: Path, cache_dir: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()
    return cache_dir / f"fingerprint-{digest}.json"


def _identity(files: Iterable[_File]) -> str:
    """Return a digest of which files these are, by name, place and times, not by content."""
    digest = hashlib.sha256(FORMAT_TAG)
    for file in files:
        numbers = (file.device, file.inode, file.size, file.mtime_ns, file.ctime_ns)
        digest.update(frame(file.name, repr(numbers).encode()))
    return digest.hexdigest()


def _read_entry(entry: Path, files: list[_File]) -> str | None:
    """Return the fingerprint kept in `entry` for exactly these files; a damaged one is a miss."""
    try:
        with entry.open("rb") as opened:
            kept = json.loads(opened.read(_READ_BYTES))
        identity, fingerprint = kept["identity"], kept["fingerprint"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_sound = isinstance(fingerprint, str) and re.fullmatch("[0-9a-f]{64}", fingerprint)
    return fingerprint if is_sound and identity == _identity(files) else None


def _write_entry(entry: Path, files: list[_File], fingerprint: str) -> None:
    """Keep `fingerprint`, readable for this user only; what cannot be written is not kept."""
    kept = {"identity": _identity(files), "fingerprint": fingerprint}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{entry.name}.", dir=entry.parent)
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            json.dump(kept, opened)
        os.replace(name, entry)
    except OSError:
        Path(name).unlink(missing_ok=True)
