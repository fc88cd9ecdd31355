"""Reading a trace in whichever of the known formats it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvray.errors import ConfigError
from kvray.replay import agentic, mooncake
from kvray.replay.agentic import CONCURRENT, Session, lay_out, read_session
from kvray.replay.files import Progress, TraceFile, opened
from kvray.replay.mooncake import read_lines
from kvray.replay.trace import Trace

_SUFFIXES = (".gz", ".xz", ".tar", ".tgz", ".txz", ".jsonl", ".json")


def read_trace(
    path: Path,
    *,
    block_tokens: int | None = None,
    concurrent: int = CONCURRENT,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """Return the trace in a file or a directory; its content says in which format it is.

    Args:
        path: of Mooncake's JSON lines, or of agentic sessions: one file, a directory or a tar
            archive of them. Files may be compressed with gzip or xz.
        block_tokens: tokens of a block, where the file does not say it; None for 512.
        concurrent: sessions that run at once, where the trace does not say when they started.
        seed: of the order in which those sessions start.
        progress: called with bytes read and bytes in all.

    Raises:
        ConfigError: it cannot be read, is damaged, or is none of these.
    """
    report = progress or (lambda done, total: None)
    name = _name(path)
    if path.is_dir():
        sessions = _sessions_in(path, report)
        trace = lay_out(sessions, name=name, concurrent=concurrent, seed=seed)
    else:
        with opened(path, report) as file:
            if mooncake.MARK in file.head and not _holds_sessions(file):
                where = str(path)
                trace = read_lines(file.lines(), name=name, where=where, block_tokens=block_tokens)
            else:
                sessions = _sessions_of(file)
                trace = lay_out(sessions, name=name, concurrent=concurrent, seed=seed)
    if not trace.num_refs:
        raise ConfigError(f"No request in {path} has a block; there is nothing to replay.")
    return trace


def _holds_sessions(file: TraceFile) -> bool:
    return file.is_archive or agentic.MARK in file.head


def _sessions_of(file: TraceFile) -> Iterator[Session]:
    """Return the sessions in a file."""
    if file.is_archive:
        for name, content in file.members():
            if name.endswith(".json"):
                yield read_session(content, name)
    elif agentic.MARK in file.head:
        yield read_session(file.stream.read(), str(file.path))
    else:
        raise ConfigError(
            f"{file.path} is no known trace: neither lines of JSON with hash_ids, as Mooncake's,"
            " nor a session with requests, nor an archive of sessions."
        )


def _sessions_in(directory: Path, progress: Progress) -> Iterator[Session]:
    """Return the sessions in the JSON files of a directory."""
    paths = sorted(directory.glob("*.json"))
    total = sum(path.stat().st_size for path in paths)
    before = 0
    for path in paths:
        with opened(path, lambda done, _: None) as file:
            yield from _sessions_of(file)
        before += path.stat().st_size
        progress(before, total)


def _name(path: Path) -> str:
    """Return the name of a file without what says how it is packed."""
    name = path.resolve().name
    while name.endswith(_SUFFIXES):
        name = name.rpartition(".")[0]
    return name
