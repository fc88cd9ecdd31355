"""Reading a trace: its content says in which of the known formats it is."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from kvray.errors import ConfigError
from kvray.lab.replay.agentic import CONCURRENT, Session, lay_out, read_session
from kvray.lab.replay.records import MooncakeLine, check_blocks, parse
from kvray.lab.replay.trace_builder import TraceBuilder
from kvray.store.replay.trace import Trace

_MOONCAKE_BLOCK_TOKENS = 512
"""Of the traces that Mooncake published; their files do not say it."""
_LINE_MARK, _SESSION_MARK = b'"hash_ids"', b'"requests"'
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 64 * 1024
_SUFFIXES = (".gz", ".xz", ".tar", ".tgz", ".txz", ".jsonl", ".json")


def read_trace(
    path: Path,
    *,
    block_tokens: int | None = None,
    concurrent: int = CONCURRENT,
    seed: int = 0,
) -> Trace:
    """Return the trace in a file or a directory; ConfigError: it cannot be read.

    `path` has Mooncake's JSON lines, or agentic sessions: one file, a directory or a tar archive of
    them. `block_tokens` counts where the file does not say it (None: 512). `concurrent` sessions
    run at once, in an order that `seed` decides.
    """
    name = _name(path)
    if path.is_dir():
        trace = lay_out(_sessions_in(path), name=name, concurrent=concurrent, seed=seed)
    else:
        with _opened(path) as file:
            head = _head(file)
            if _LINE_MARK in head and not (_is_archive(head) or _SESSION_MARK in head):
                trace = _read_lines(file, path, name, block_tokens or _MOONCAKE_BLOCK_TOKENS)
            else:
                sessions = _sessions_of(file, path)
                trace = lay_out(sessions, name=name, concurrent=concurrent, seed=seed)
    if not trace.num_refs:
        raise ConfigError(f"No request in {path} has a block; there is nothing to replay.")
    return trace


def _read_lines(lines: Iterable[bytes], path: Path, name: str, block_tokens: int) -> Trace:
    """Return the trace with the request of each line of Mooncake's; empty lines are skipped."""
    builder = TraceBuilder(name=name, block_tokens=block_tokens)
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        here = f"{path}, line {number}"
        line = parse(MooncakeLine, text, here)
        check_blocks(len(line.hash_ids), line.input_length, block_tokens, here)
        time_s, num_tokens = line.timestamp / 1000, line.input_length
        builder.add(time_s=time_s, num_tokens=num_tokens, ids=line.hash_ids)
    return builder.build()


def _sessions_in(directory: Path) -> Iterator[Session]:
    for path in sorted(directory.glob("*.json")):
        with _opened(path) as file:
            yield from _sessions_of(file, path)


def _sessions_of(file: io.BufferedReader, path: Path) -> Iterator[Session]:
    head = _head(file)
    if _is_archive(head):
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and member.name.endswith(".json"):
                    yield read_session(content.read(), f"{path}: {member.name}")
    elif _SESSION_MARK in head:
        yield read_session(file.read(), str(path))
    else:
        raise ConfigError(
            f"{path} is no known trace: neither lines of JSON with hash_ids, as Mooncake's,"
            " nor a session with requests, nor an archive of sessions."
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for the block, unpacked; ConfigError: it is damaged, also later in the block."""
    try:
        with path.open("rb") as raw:
            magic = raw.peek(len(_XZ))
            unpacked: object = raw
            if magic.startswith(_GZIP):
                unpacked = gzip.GzipFile(fileobj=raw)
            elif magic.startswith(_XZ):
                unpacked = lzma.LZMAFile(raw)  # noqa: SIM115 - closes with `raw`
            yield io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_HEAD_BYTES)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(
            f"{path} is cut short or damaged ({str(error).rstrip('.')}); get the file again."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None


def _head(file: io.BufferedReader) -> bytes:
    return file.peek(_HEAD_BYTES)[:_HEAD_BYTES]


def _is_archive(head: bytes) -> bool:
    return head[_TAR_AT:].startswith(_TAR)


def _name(path: Path) -> str:
    """Return the name of a file without the suffixes that say how it is packed."""
    name = path.resolve().name
    while name.endswith(_SUFFIXES):
        name = name.rpartition(".")[0]
    return name
