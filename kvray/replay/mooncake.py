"""Mooncake's format: one JSON object a line, ids that hold for the whole file."""

from __future__ import annotations

from collections.abc import Iterable

from kvray.errors import ConfigError
from kvray.replay.fields import Record, as_object, parse
from kvray.replay.trace import Trace, TraceBuilder

BLOCK_TOKENS = 512
"""Of the traces that Mooncake published; a file does not say it."""

MARK = b'"hash_ids"'


def read_lines(lines: Iterable[bytes], *, name: str, where: str, block_tokens: int | None) -> Trace:
    """Return the trace that a file holds.

    Args:
        lines: of the file; empty ones are left out.
        name: of the trace.
        where: what errors call the file.
        block_tokens: tokens of a block; None for Mooncake's own.

    Raises:
        ConfigError: a line is damaged, or its prompt has another number of blocks.

    Source: `timestamp` is in milliseconds and `hash_ids` are chained, as in FAST25-release/traces
    of kvcache-ai/Mooncake.
    """
    block_tokens = BLOCK_TOKENS if block_tokens is None else block_tokens
    builder = TraceBuilder(name=name, block_tokens=block_tokens)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        line_where = f"{where}, line {number}"
        record = Record(as_object(parse(line, line_where), line_where), line_where)
        ids, num_tokens = record.ids(), record.count("input_length")
        check_blocks(len(ids), num_tokens, block_tokens, line_where)
        builder.add(
            time_s=record.number("timestamp") / 1000,
            num_tokens=num_tokens,
            ids=ids,
            num_answer_tokens=record.count("output_length", 0),
        )
    return builder.build()


def check_blocks(num_blocks: int, num_tokens: int, block_tokens: int, where: str) -> None:
    """Refuse a prompt that does not have as many blocks as its tokens fill or begin."""
    if not num_tokens // block_tokens <= num_blocks <= -(-num_tokens // block_tokens):
        raise ConfigError(
            f"{where}: {num_tokens} tokens are not {num_blocks} blocks of {block_tokens} tokens;"
            " give the size of the trace's blocks with --block-tokens, or get the file again."
        )
