"""Makes a trace of requests that come in any order, with ids of their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvray.store.replay.trace import NO_PARENT, Ints, Trace


class TraceBuilder:
    """Takes requests in any order, and makes a trace of them."""

    def __init__(self, *, name: str, block_tokens: int) -> None:
        self._name = name
        self._block_tokens = block_tokens
        # Time, tokens, ids and space of each request.
        self._requests: list[tuple[float, int, Ints, Any]] = []

    def add(
        self, *, time_s: float, num_tokens: int, ids: Sequence[int] | Ints, space: Any = None
    ) -> None:
        """Take a request; equal ids of different `space`s are different blocks."""
        self._requests.append((time_s, num_tokens, np.asarray(ids, dtype=np.int64), space))

    def build(self) -> Trace:
        """Return the trace of all requests.

        Ids of the content alone are told apart by the blocks before them.
        """
        requests = sorted(self._requests, key=lambda request: request[0])
        roots: dict[Any, int] = {}
        # (block before, id) -> block; below 0 a space stands for the block before a root.
        blocks: dict[tuple[int, int], int] = {}
        parents: list[int] = []
        depths: list[int] = []
        parts = [np.zeros(0, dtype=np.int64)]
        for _, _, ids, space in requests:
            before = roots.setdefault(space, -1 - len(roots))
            path = []
            for depth, one in enumerate(ids.tolist()):
                block = blocks.setdefault((before, one), len(parents))
                if block == len(parents):
                    parents.append(max(before, NO_PARENT))
                    depths.append(depth)
                path.append(block)
                before = block
            parts.append(np.array(path, dtype=np.int64))
        times = np.array([time_s for time_s, *_ in requests], dtype=np.float64)
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            times=times - times[:1],
            starts=np.cumsum([len(part) for part in parts]),
            ids=np.concatenate(parts),
            num_tokens=np.array([num_tokens for _, num_tokens, *_ in requests], dtype=np.int64),
            parents=np.array(parents, dtype=np.int64),
            depths=np.array(depths, dtype=np.int64),
        )
