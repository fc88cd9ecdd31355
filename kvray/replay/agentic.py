"""The agentic format: one JSON object a session, which says when in the session, not when."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.errors import ConfigError
from kvray.replay.fields import Record, as_object, parse
from kvray.replay.mooncake import check_blocks
from kvray.replay.trace import Ints, Trace, TraceBuilder

CONCURRENT = 16
"""Sessions that run at the same time unless something else is asked for."""

MARK = b'"requests"'
_LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a session."""

    time_s: float
    """Since the session's start."""
    num_tokens: int
    ids: Ints
    """An array: as Python's integers the ids of many sessions would not fit into memory."""
    num_answer_tokens: int
    model: str
    """Another model's blocks are other blocks, whatever their ids are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one user had done, with what the agents did that it started."""

    name: str
    block_tokens: int
    is_local: bool
    """Whether its ids mean something in this session only."""
    requests: Sequence[Request]

    @property
    def seconds(self) -> float:
        """From its start to its last request."""
        return max((request.time_s for request in self.requests), default=0.0)


def read_session(content: bytes, where: str) -> Session:
    """Return the session that a file holds.

    Raises:
        ConfigError: it is damaged.

    Source: traces/trace_NNNN.json of callanjfox/kv-cache-tester. `t` is in seconds; those of a
    subagent's requests count from its own `t`.
    """
    record = Record(as_object(parse(content, where), where), where)
    block_tokens = record.count("block_size")
    if not block_tokens:
        raise ConfigError(f"{where}: block_size must be at least 1, and is 0; get the file again.")
    return Session(
        name=where,
        block_tokens=block_tokens,
        is_local=record.values.get("hash_id_scope", _LOCAL) == _LOCAL,
        requests=list(_requests(record, 0.0, block_tokens)),
    )


def lay_out(
    sessions: Iterable[Session], *, name: str, concurrent: int = CONCURRENT, seed: int = 0
) -> Trace:
    """Return the trace of sessions that users have one after the other.

    The sessions say nothing about when they started. Here `concurrent` users begin at the same
    time, and each begins another session as soon as the last one has made its last request. Which
    one comes next is drawn.

    Args:
        sessions: all with blocks of one size.
        name: of the trace.
        concurrent: how many sessions run at once.
        seed: of the draw; the same one gives the same trace.

    Raises:
        ConfigError: there is none, or their blocks differ in size.
    """
    in_turn = sorted(sessions, key=lambda session: session.name)
    _check_sizes(in_turn, name)
    random.Random(seed).shuffle(in_turn)
    builder = TraceBuilder(name=name, block_tokens=in_turn[0].block_tokens)
    free_s = [0.0] * concurrent
    for session in in_turn:
        start_s = heapq.heappop(free_s)
        heapq.heappush(free_s, start_s + session.seconds)
        scope = session.name if session.is_local else None
        for request in session.requests:
            builder.add(
                time_s=start_s + request.time_s,
                num_tokens=request.num_tokens,
                ids=request.ids,
                num_answer_tokens=request.num_answer_tokens,
                space=(scope, request.model),
            )
    return builder.build()


def _requests(holder: Record, start_s: float, block_tokens: int) -> Iterator[Request]:
    """Return the requests of a session or a subagent, and of the subagents in it."""
    for record in holder.records("requests"):
        time_s = start_s + record.number("t")
        if "requests" in record.values:
            yield from _requests(record, time_s, block_tokens)
            continue
        ids, num_tokens = record.ids(), record.count("in")
        check_blocks(len(ids), num_tokens, block_tokens, record.where)
        yield Request(
            time_s=time_s,
            num_tokens=num_tokens,
            ids=np.array(ids, dtype=np.int64),
            num_answer_tokens=record.count("out", 0),
            model=str(record.values.get("model", "")),
        )


def _check_sizes(sessions: Sequence[Session], name: str) -> None:
    if not sessions:
        raise ConfigError(
            f"There is no session in {name}; give a .json file of one, or a directory or an archive"
            " of them."
        )
    first = sessions[0]
    for session in sessions:
        if session.block_tokens != first.block_tokens:
            raise ConfigError(
                f"{session.name} has blocks of {session.block_tokens} tokens and {first.name} of"
                f" {first.block_tokens}; replay them apart."
            )
