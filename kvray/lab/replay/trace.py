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
    num_answer_tokens: Ints
    """Tokens that each request generated; 0 where the trace does not say; [num_requests]."""

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
        return _num_unique(self.ids)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return int(self.num_tokens.sum())

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return float(self.times[-1]) if len(self.times) else 0.0

    def parents(self) -> Ints:
        """Return the block before each block, `NO_PARENT` for roots; shape [num_unique]."""
        return _first_values(_before(self.ids, self.starts), self.ids)

    def depths(self) -> Ints:
        """Return the place of each block in every prompt that has it; shape [num_unique]."""
        place = np.arange(self.num_refs) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return _first_values(place, self.ids)

    def first_places(self) -> Ints:
        """Return where each block comes first in `ids`; shape [num_unique]."""
        return _first_values(np.arange(self.num_refs), self.ids)

    def hit_tokens(self, hit_blocks: Ints) -> int:
        """Return the tokens in the first `hit_blocks[r]` blocks of every request `r`."""
        return int(np.minimum(hit_blocks * self.block_tokens, self.num_tokens).sum())


class TraceBuilder:
    """Takes requests in any order, and makes a trace of them."""

    def __init__(self, *, name: str, block_tokens: int) -> None:
        """Start without a request."""
        self._name = name
        self._block_tokens = block_tokens
        # Of each request: when it was made, tokens of its prompt, and of its answer.
        self._figures: list[tuple[float, int, int]] = []
        self._ids: list[Ints] = []
        self._spaces: dict[Any, list[int]] = {}

    def add(
        self,
        *,
        time_s: float,
        num_tokens: int,
        ids: Sequence[int] | Ints,
        num_answer_tokens: int = 0,
        space: Any = None,
    ) -> None:
        """Take a request; equal ids of different `space`s are different blocks.

        Raises:
            OverflowError: an id has more than 64 bits.
        """
        self._ids.append(np.asarray(ids, dtype=np.int64))
        self._spaces.setdefault(space, []).append(len(self._figures))
        self._figures.append((time_s, num_tokens, num_answer_tokens))

    def build(self) -> Trace:
        """Return the trace of all requests; this ends the builder's use."""
        self._tell_spaces_apart()
        times = np.array([time_s for time_s, _, _ in self._figures], dtype=np.float64)
        counts = np.array([rest for _, *rest in self._figures], dtype=np.int64).reshape(-1, 2)
        order = np.argsort(times, kind="stable")
        parts = [self._ids[at] for at in order]
        starts = np.cumsum([0, *map(len, parts)])
        ids = np.concatenate([np.zeros(0, np.int64), *parts])
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            times=times[order] - times[order[:1]],
            starts=starts,
            ids=_chained(_in_order_of_use(ids), starts),
            num_tokens=counts[order, 0],
            num_answer_tokens=counts[order, 1],
        )

    def _tell_spaces_apart(self) -> None:
        """Number the blocks of all spaces without gaps, one space after the other."""
        first = 0
        for members in self._spaces.values():
            together = np.concatenate([self._ids[at] for at in members])
            unique, numbers = np.unique(together, return_inverse=True)
            ends = np.cumsum([len(self._ids[at]) for at in members])
            for at, part in zip(members, np.split(numbers + first, ends[:-1]), strict=True):
                self._ids[at] = part
            first += len(unique)


def _chained(ids: Ints, starts: Ints) -> Ints:
    """Return ids that name a block together with its prefix.

    Those of the known traces do so already and are returned as they are. Ids of the content alone
    are told apart by what comes before them, and renumbered in the order of first use.
    """
    before = _before(ids, starts)
    if (_first_values(before, ids)[ids] == before).all():
        return ids
    known: dict[tuple[int, int], int] = {}
    found = []
    roots = set(starts.tolist())
    parent = NO_PARENT
    for at, one in enumerate(ids.tolist()):
        if at in roots:
            parent = NO_PARENT
        parent = known.setdefault((parent, one), len(known))
        found.append(parent)
    return np.array(found, dtype=np.int64)


def _in_order_of_use(ids: Ints) -> Ints:
    """Return ids renumbered in the order of first use."""
    numbers = np.empty(_num_unique(ids), dtype=np.int64)
    numbers[np.argsort(_first_values(np.arange(len(ids)), ids))] = np.arange(len(numbers))
    return numbers[ids]


def _num_unique(ids: Ints) -> int:
    return int(ids.max()) + 1 if len(ids) else 0


def _before(ids: Ints, starts: Ints) -> Ints:
    """Return the id before each one in its request, `NO_PARENT` for the first."""
    before = np.concatenate([np.full(1, NO_PARENT), ids[:-1]])[: len(ids)]
    before[starts[:-1][np.diff(starts) > 0]] = NO_PARENT
    return before


def _first_values(values: Ints, ids: Ints) -> Ints:
    """Return the value at the first place of each id."""
    found = np.empty(_num_unique(ids), dtype=np.int64)
    found[ids[::-1]] = values[::-1]  # of equal indices, the last assignment stays
    return found
