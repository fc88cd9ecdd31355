"""Agentic sessions, whose requests are timed from their session's start, laid out as a trace."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.errors import ConfigError
from kvray.lab.replay.records import SessionFile, Step, check_blocks, parse
from kvray.lab.replay.trace_builder import TraceBuilder
from kvray.store.replay.trace import Trace

CONCURRENT = 16
"""Sessions that run at the same time, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The requests of one user, with those of the subagents that they started."""

    name: str
    block_tokens: int
    requests: Sequence[dict[str, Any]]
    """Arguments of `TraceBuilder.add`; times count from the session's start."""

    @property
    def seconds(self) -> float:
        """From its start to its last request."""
        return max((request["time_s"] for request in self.requests), default=0.0)


def read_session(content: bytes, where: str) -> Session:
    """Return the session in a file; ConfigError: it is damaged, and the message names `where`."""
    file = parse(SessionFile, content, where)
    scope = where if file.hash_id_scope == "local" else None
    requests = _requests(file.requests, 0.0, file.block_size, scope, where)
    return Session(name=where, block_tokens=file.block_size, requests=list(requests))


def lay_out(
    sessions: Iterable[Session], *, name: str, concurrent: int = CONCURRENT, seed: int = 0
) -> Trace:
    """Return the trace of users who have one session after the other.

    Sessions do not say when they started. Here `concurrent` users begin at the same time. A user
    begins another session right after the last request of a session. `seed` decides their order.
    ConfigError: there is no session, or their blocks differ in size.
    """
    in_turn = sorted(sessions, key=lambda session: session.name)
    if not in_turn:
        raise ConfigError(
            f"There is no session in {name}; give the .json file of one, or a directory or an"
            " archive of them."
        )
    first = in_turn[0]
    for session in in_turn:
        if session.block_tokens != first.block_tokens:
            raise ConfigError(
                f"{session.name} has blocks of {session.block_tokens} tokens and {first.name} of"
                f" {first.block_tokens}; replay them apart."
            )
    random.Random(seed).shuffle(in_turn)
    builder = TraceBuilder(name=name, block_tokens=first.block_tokens)
    free_s = [0.0] * concurrent
    for session in in_turn:
        start_s = heapq.heappop(free_s)
        heapq.heappush(free_s, start_s + session.seconds)
        for request in session.requests:
            builder.add(**request | {"time_s": start_s + request["time_s"]})
    return builder.build()


def _requests(
    steps: Sequence[Step], start_s: float, block_tokens: int, scope: str | None, where: str
) -> Iterator[dict[str, Any]]:
    """Return the requests of a session or a subagent, and of the subagents in it."""
    for at, step in enumerate(steps):
        time_s, here = start_s + step.t, f"{where}, requests[{at}]"
        if step.requests is not None:
            yield from _requests(step.requests, time_s, block_tokens, scope, here)
            continue
        check_blocks(len(step.hash_ids), step.num_tokens, block_tokens, here)
        yield {
            "time_s": time_s,
            "num_tokens": step.num_tokens,
            # As Python's integers the ids of many sessions would not fit into memory.
            "ids": np.array(step.hash_ids, dtype=np.int64),
            "space": (scope, str(step.model)),
        }
