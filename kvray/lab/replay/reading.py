"""Reading a trace: its content says in which of the known formats it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvray.errors import ConfigError
from kvray.lab.replay.agentic import CONCURRENT, Session, lay_out, read_session
from kvray.lab.replay.files import Progress, TraceFile, opened
from kvray.lab.replay.records import MooncakeLine, check_blocks, parse
from kvray.lab.replay.trace import Trace, TraceBuilder

_MOONCAKE_BLOCK_TOKENS = 512
"""Of the traces that Mooncake published; their files do not say it."""
_LINE_MARK, _SESSION_MARK = b'"hash_ids"', b'"requests"'
_SUFFIXES = (".gz", ".xz", ".tar", ".tgz", ".txz", ".jsonl", ".json")


def read_trace(
    path: Path,
    *,
    block_tokens: int | None = None,
    concurrent: int = CONCURRENT,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Trace:
    """Return the trace in a file or a directory.

    Args:
        path: Mooncake's JSON lines, or agentic sessions: one file, a directory or a tar archive
            of them. Files may be compressed with gzip or xz.
        block_tokens: tokens of a block where the file does not say it; None for 512.
        concurrent: sessions that run at once, where the trace does not say when they started.
        seed: of the order in which those sessions start.
        progress: takes bytes read and bytes in all.

    Raises:
        ConfigError: it cannot be read, is damaged, or has neither format.
    """
    name = _name(path)
    if path.is_dir():
        trace = lay_out(_sessions_in(path, progress), name=name, concurrent=concurrent, seed=seed)
    else:
        with opened(path, progress) as file:
            if _LINE_MARK in file.head and not (file.is_archive or _SESSION_MARK in file.head):
                block_tokens = block_tokens or _MOONCAKE_BLOCK_TOKENS
                builder = TraceBuilder(name=name, block_tokens=block_tokens)
                _add_lines(builder, file.lines(), str(path), block_tokens)
                trace = builder.build()
            else:
                sessions = _sessions_of(file)
                trace = lay_out(sessions, name=name, concurrent=concurrent, seed=seed)
    if not trace.num_refs:
        raise ConfigError(f"No request in {path} has a block; there is nothing to replay.")
    return trace


def _add_lines(
    builder: TraceBuilder, lines: Iterable[bytes], where: str, block_tokens: int
) -> None:
    """Add the request of each line of Mooncake's; empty lines are skipped."""
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        here = f"{where}, line {number}"
        line = parse(MooncakeLine, text, here)
        check_blocks(len(line.hash_ids), line.input_length, block_tokens, here)
        builder.add(
            time_s=line.timestamp / 1000,
            num_tokens=line.input_length,
            ids=line.hash_ids,
            num_answer_tokens=line.output_length,
        )


def _sessions_of(file: TraceFile) -> Iterator[Session]:
    if file.is_archive:
        for name, content in file.members():
            if name.endswith(".json"):
                yield read_session(content, name)
    elif _SESSION_MARK in file.head:
        yield read_session(file.stream.read(), str(file.path))
    else:
        raise ConfigError(
            f"{file.path} is no known trace: neither lines of JSON with hash_ids, as Mooncake's,"
            " nor a session with requests, nor an archive of sessions."
        )


def _sessions_in(directory: Path, progress: Progress) -> Iterator[Session]:
    sizes = {path: path.stat().st_size for path in sorted(directory.glob("*.json"))}
    done = 0
    for path, size in sizes.items():
        with opened(path, lambda *_: None) as file:
            yield from _sessions_of(file)
        done += size
        progress(done, sum(sizes.values()))


def _name(path: Path) -> str:
    """Return the name of a file without the suffixes that say how it is packed."""
    name = path.resolve().name
    while name.endswith(_SUFFIXES):
        name = name.rpartition(".")[0]
    return name
