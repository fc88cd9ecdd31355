"""The files of a checkpoint that belong to the model, and how to tell that one has changed."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvray.errors import ConfigError

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
