"""A request trace as flat arrays: what each request asked for, in the order of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

NO_PARENT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The requests of a trace. Equal ids are equal blocks after equal prefixes.

    The blocks of request `r` are `ids[starts[r]:starts[r + 1]]`, from the root on. A block has one
    parent wherever it is used, so that requests are paths from the roots of a forest.
    """

    name: str
    block_tokens: int
    times: Floats
    """Seconds, ascending from 0; shape [num_requests]."""
    starts: Ints
    """Where each request's blocks begin in `ids`, and the end of all; [num_requests + 1]."""
    ids: Ints
    """0 to num_unique - 1 in the order of first use; [num_refs]."""
    num_tokens: Ints
    """Tokens of each prompt, which may end in its last block or after it; [num_requests]."""
    parents: Ints
    """The block before each block, `NO_PARENT` for roots; [num_unique]."""
    depths: Ints
    """The place of each block in every prompt that has it; [num_unique]."""

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.times)

    @property
    def num_refs(self) -> int:
        """How many blocks the requests ask for."""
        return len(self.ids)

    @property
    def num_unique(self) -> int:
        """How many different blocks there are."""
        return len(self.parents)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return int(self.num_tokens.sum())

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return float(self.times[-1]) if len(self.times) else 0.0

    def hit_tokens(self, hit_blocks: Ints) -> int:
        """Return the tokens in the first `hit_blocks[r]` blocks of every request `r`."""
        return int(np.minimum(hit_blocks * self.block_tokens, self.num_tokens).sum())


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
