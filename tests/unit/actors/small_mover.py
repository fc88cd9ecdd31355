"""What the tests of movers build: nodes of their own, and peers that need no Ray."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvray.actors.mover.mover import Mover
from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.config import StagingConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena, PartRequest
from kvray.store.arena.layout import READY, RESERVED
from tests.far import Far
from tests.unit.store.small_arena import fetch, make_arena, spec
from tests.waiting import wait_for

# Before the first agent of this process, which reads it; all nodes are on one machine.
os.environ.setdefault("UCX_TLS", "tcp")

DEADLINE_S = 30.0
LOCK_WAIT_S = 0.5
# Patient: a busy machine may take seconds for what takes milliseconds, and nothing is at fault.
SETTINGS = StagingConfig(
    transports=("nixl",),
    call_timeout_s=10.0,
    lease_s=20.0,
    fetches_max=4,
    bytes_in_flight=64 * 2**20,
)


class Node:
    """A directory, the arena in it as its owner has it, and a mover."""

    def __init__(self, directory: Path, name: str, peers: dict[str, "Call"], **asked: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.name = name
        self._peers = peers
        self.ended = 0
        self.arena = make_arena(directory, asked=spec(**asked))
        self.arena.join("owner")
        self.mover: Mover | None = None
        self.far: Far | None = None

    def start(self, **changes: Any) -> Mover:
        self.mover = Mover(
            self.name,
            self.directory,
            SETTINGS.model_copy(update=changes),
            Movers(self._peers),
            self._end,
            lock_wait_s=LOCK_WAIT_S,
        )
        self.mover.start()
        wait_for(lambda: self.mover.status()["state"] == "serving")
        return self.mover

    def fetch(self, *spans: Span, deadline_s: float = DEADLINE_S) -> FetchReport:
        return self.mover.fetch(FetchOrder(spans=spans, deadline_s=deadline_s))

    @property
    def num_reserved(self) -> int:
        return len(self.arena.tables.slots_in(RESERVED))

    @property
    def num_ready(self) -> int:
        return len(self.arena.tables.slots_in(READY))

    @property
    def num_leases(self) -> int:
        return int((self.arena.tables.page_holder > 0).sum())

    def close(self) -> None:
        if self.mover is not None:
            self.mover.stop()
        if self.far is not None:
            self.far.kill()
        self.arena.close()

    def _end(self) -> None:
        self.ended += 1


MakeNode = Callable[..., Node]
Call = Callable[..., Any]
"""Calls a method of a mover, which its first argument names."""


class Movers:
    """The movers that a node can call."""

    def __init__(self, peers: dict[str, Call]) -> None:
        self._peers = peers

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, mover: str, *args: Any, timeout_s: float) -> Any:
        if mover not in self._peers:
            raise ShardUnavailable(f"There is no {mover}.")
        return self._peers[mover](method, *args, timeout_s=timeout_s)


def near(mover: Mover) -> Call:
    """Return how to call a mover of this process, which answers at once."""
    return lambda method, *args, timeout_s: getattr(mover, method)(*args)


def far_mover(directory: str) -> Mover:
    mover = Mover("far", Path(directory), SETTINGS, Movers({}), lock_wait_s=LOCK_WAIT_S)
    mover.start()
    wait_for(lambda: mover.status()["state"] == "serving")
    return mover


def span(source: str, keys: list[BlockKey], **place: Any) -> Span:
    """Return a span of part 0 from the root, or where `place` says."""
    made = {"part": 0, "parent": b"", "depth": 0, "needs_parent": True} | place
    return Span(source=source, keys=b"".join(keys), **made)


def is_right(arena: Arena, keys: list[BlockKey], *, part: int = 0, block_bytes: int) -> bool:
    """Return whether all of `keys` are READY with the bytes that a test stored."""
    if not keys:
        return True
    held = arena.lease_for(keys, [[PartRequest(part)]])
    if held is None or held.num_blocks < len(keys):
        return False
    right = fetch(arena, keys, held.leases[0], part=part, block_bytes=block_bytes)
    arena.release(*held.leases)
    return right
