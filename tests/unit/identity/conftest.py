"""Small checkpoints for tests."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvray.identity.fingerprint import fingerprint_model

CONFIG = '{"num_hidden_layers": 2}'
GOLDEN = "f0baba46ca8a65394c785672eb237a3affc8f34a308f17a5cceb62f5fc6fad55"


def safetensors(tensors: dict[str, bytes], **metadata: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, data in tensors.items():
        span = [end, end := end + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": span}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


TENSORS = {"embed": bytes(range(256)) * 4, "layer.0": b"\1" * 500, "layer.1": b"\2" * 500}


def write_checkpoint(directory: Path, **files: bytes | str) -> Path:
    """Write a small checkpoint; `files` add to it or replace (`__` in a name stands for a dot)."""
    directory.mkdir(parents=True)
    given: dict[str, bytes | str] = {"config__json": CONFIG}
    given["model__safetensors"] = safetensors(TENSORS)
    for name, data in (given | files).items():
        path = directory / name.replace("__", ".")
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return directory


def of(path: Path | str, cache_dir: Path | None = None, **more: Any) -> str:
    return fingerprint_model(path, cache_dir=cache_dir, **more)


def change_byte(path: Path, offset: int) -> None:
    """Change one byte in place and put the file's time of modification back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_sizes(
    patch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = int,
    after: Callable[[], object] = int,
) -> list[int]:
    """Return a list to which the size of each read is added, between the two calls."""
    sizes, preadv = list[int](), os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        before()
        sizes.append(preadv(descriptor, buffers, offset))
        after()
        return sizes[-1]

    patch.setattr(os, "preadv", read)
    return sizes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvray"
