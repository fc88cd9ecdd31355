"""A request trace as flat arrays: what each request asked for, in the order of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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
