"""A sample of a node's traffic in fixed memory: the latest prompts, by a part of their keys.

Each sampled key stands for the same number of bytes, the quantum, whatever its namespace: one with
larger blocks has more of its keys in the sample. So namespaces share a small cache as they share
the arena. A full sample becomes thinner, up to a point; after it the oldest prompts go.

Source: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015, for sampling by
the key's hash at a rate that falls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvray.store.arena.tables import Array
from kvray.store.replay import NO_PARENT, Trace
from kvray.store.sizing.prompts import LIMIT_MAX, SampledPrompts, sampled_lengths

KEYS_MAX, PROMPTS_MAX = 2**17, 2**14
"""Of a sample; with what a replay of it needs that takes some 40 MB."""
_SLOTS_MIN = 64
"""Blocks that the node's memory has in the sample at least, unless it has fewer in fact."""
_SPACES_MAX, _IDLE_PROMPTS = 64, 1024
"""Another namespace takes the place of one of which nothing was among so many prompts."""
_SLIDE = 4  # the part of a full sample that goes at once

_SUMS = "blocks", "own", "hit", "disk", "remote", "tokens"
_ROW = np.dtype(
    [
        ("time", "f8"),
        ("space", "u2"),
        ("lengths", "i8", 3),
        *((name, "f8") for name in _SUMS),
    ]
)
"""One prompt: when, its namespace, its keys as in `SampledPrompts.lengths`, and the sums of its
namespace before it."""


@dataclass(slots=True)
class _Space:
    """A namespace, with the sums of all its prompts."""

    name: str
    block_bytes: int
    tokens_per_block: int
    sums: Array = field(default_factory=lambda: np.zeros(len(_SUMS)))
    seen_at: int = 0  # prompts that had come when the last of its own did


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """A namespace of a window; the sums are of the counted prompts, sampled or not.

    Of their blocks the engines had `num_own`, and the tier promised `num_hit`; of these `num_disk`
    came from the node's disk, and `num_remote` from other nodes.
    """

    name: str
    rate: float
    """The share of its keys that is in the sample."""
    tokens_per_block: int
    num_blocks: float
    num_own: float
    num_hit: float
    num_disk: float
    num_remote: float
    num_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A sample at one moment, as a trace of its own."""

    trace: Trace
    names: Array
    """The number of the key of each block in the trace."""
    quantum: int
    """Bytes that one block of the trace stands for."""
    spaces: tuple[Space, ...]
    space_of: Array
    """Of each prompt, an index into `spaces`."""
    lengths: Array
    counted_from: int
    """The first prompt that counts; those before it only fill the cache."""
    num_lost: int

    @property
    def seconds(self) -> float:
        """From the first counted prompt to the last."""
        times = self.trace.times[self.counted_from :]
        return float(times[-1] - times[0]) if len(times) else 0.0


class TrafficSample:
    """The latest prompts of one node; bounded, no clock."""

    def __init__(
        self, capacity_bytes: int, *, keys_max: int = KEYS_MAX, prompts_max: int = PROMPTS_MAX
    ) -> None:
        """Take a sample that suits a node with so much memory for blocks."""
        self.num_lost = 0  # prompts that nobody could look at
        self.num_seen = 0  # prompts that ever came into the sample
        self._capacity_bytes = capacity_bytes
        self._keys = np.zeros(keys_max, dtype=np.uint64)
        self._rows = np.zeros(prompts_max, dtype=_ROW)
        self._num_keys = self._num_rows = 0
        self._quantum = 1
        self._spaces: list[_Space] = []
        self._has_slid = False

    def limit(self, name: str, *, block_bytes: int) -> int:
        """Return the limit of a namespace, known or not, for `SampledPrompts`."""
        known = next((one.block_bytes for one in self._spaces if one.name == name), block_bytes)
        return _limit(known, max(self._quantum, known))

    def add(
        self,
        name: str,
        prompts: SampledPrompts,
        *,
        block_bytes: int,
        tokens_per_block: int,
        now: float,
    ) -> None:
        """Take an engine's prompts; a sample that is too thin, of before a restart, is lost."""
        at = self._enter(name, block_bytes, tokens_per_block)
        self.num_lost += prompts.num_lost
        if at is None or prompts.limit < _limit(self._spaces[at].block_bytes, self._quantum):
            self.num_lost += len(prompts.ages)
            return
        space, before = self._spaces[at], self._spaces[at].sums
        space.seen_at = self.num_seen + self.num_lost
        grown = np.array([getattr(prompts, f"num_{name}") for name in _SUMS])
        space.sums = before + grown
        rows = np.zeros(len(prompts.ages), dtype=_ROW)
        rows["time"], rows["space"], rows["lengths"] = now - prompts.ages, at, prompts.lengths
        part = np.arange(len(rows)) / max(1, len(rows))
        for column, value, more in zip(_SUMS, before, grown, strict=True):
            rows[column] = value + part * more
        keys, rows = self._thinned(prompts.keys, rows, self._quantum)
        while self._is_full(len(keys), len(rows)) and self._make_room():
            keys, rows = self._thinned(keys, rows, self._quantum)
        if self._is_full(len(keys), len(rows)):
            self.num_lost += len(rows)
            return
        self._keys[self._num_keys : self._num_keys + len(keys)] = keys
        self._rows[self._num_rows : self._num_rows + len(rows)] = rows
        self._num_keys += len(keys)
        self._num_rows += len(rows)
        self.num_seen += len(rows)

    @property
    def num_bytes(self) -> int:
        """Memory that it has, however much is in it."""
        return self._keys.nbytes + self._rows.nbytes

    def window(self, prompts_max: int = PROMPTS_MAX, *, counted_share: float = 0.5) -> Window:
        """Return what is in it now, in the order of time.

        It has no more than `prompts_max`: it is made thinner, as far as a sample may be, and then
        the oldest ones go. Only the last `counted_share` counts, at most half if some are gone: a
        memory that fills finds less than one that is full.
        """
        rows, keys = self._in_order()
        quantum = self._quantum
        while len(rows) > prompts_max and self._may_thin(quantum):
            quantum *= 2
            keys, rows = self._thinned(keys, rows, quantum)
        has_slid = self._has_slid or len(rows) > prompts_max
        rows = rows[-prompts_max:]
        keys = keys[len(keys) - int(rows["lengths"][:, 0].sum()) :]
        counted = len(rows) - round(
            (min(0.5, counted_share) if has_slid else counted_share) * len(rows)
        )
        trace, names = _trace_of(rows, keys)
        return Window(
            trace=trace,
            names=names,
            quantum=quantum,
            spaces=tuple(
                self._counted(at, rows[counted:], quantum) for at in range(len(self._spaces))
            ),
            space_of=rows["space"],
            lengths=rows["lengths"],
            counted_from=counted,
            num_lost=self.num_lost,
        )

    def _in_order(self) -> tuple[Array, Array]:
        rows, keys = self._rows[: self._num_rows], self._keys[: self._num_keys]
        order = np.argsort(rows["time"], kind="stable")
        num = rows["lengths"][:, 0]
        starts = np.cumsum(num) - num
        shift = starts[order] - (np.cumsum(num[order]) - num[order])
        return rows[order], keys[np.arange(len(keys)) + np.repeat(shift, num[order])]

    def _counted(self, at: int, rows: Array, quantum: int) -> Space:
        space, mine = self._spaces[at], rows[rows["space"] == at]
        before = np.array(mine[0][list(_SUMS)].tolist()) if len(mine) else space.sums
        counted = (space.sums - before).tolist()
        return Space(
            name=space.name,
            rate=(_limit(space.block_bytes, quantum) + 1) / 2**64,
            tokens_per_block=space.tokens_per_block,
            **{f"num_{name}": count for name, count in zip(_SUMS, counted, strict=True)},
        )

    def _enter(self, name: str, block_bytes: int, tokens_per_block: int) -> int | None:
        """Return the place of a namespace; None: there are too many at a time.

        It may be that of one of which nothing has come for long.
        """
        for at, space in enumerate(self._spaces):
            if space.name == name:
                if space.block_bytes < block_bytes:  # another of its ranks has registered here
                    self._keep(self._rows[: self._num_rows]["space"] != at)
                    space.block_bytes = block_bytes
                    self._widen(block_bytes)
                return at
        at, made = len(self._spaces), _Space(name, block_bytes, tokens_per_block)
        if at < _SPACES_MAX:
            self._spaces.append(made)
        else:
            at = min(range(at), key=lambda one: self._spaces[one].seen_at)
            if self.num_seen + self.num_lost < self._spaces[at].seen_at + _IDLE_PROMPTS:
                return None
            self._keep(self._rows[: self._num_rows]["space"] != at)
            self._spaces[at] = made
        self._widen(block_bytes)
        return at

    def _widen(self, quantum: int) -> None:
        """Have a key stand for `quantum` bytes at least."""
        if quantum > self._quantum:
            self._quantum = quantum
            keys, rows = self._keys[: self._num_keys], self._rows[: self._num_rows]
            self._put(*self._thinned(keys, rows, quantum))

    def _may_thin(self, quantum: int) -> bool:
        return self._capacity_bytes >= 2 * _SLOTS_MIN * quantum

    def _is_full(self, num_keys: int, num_rows: int) -> bool:
        over = self._num_keys + num_keys > len(self._keys)
        return over or self._num_rows + num_rows > len(self._rows)

    def _make_room(self) -> bool:
        """Make the sample thinner, or let the oldest prompts go; False: it is empty."""
        if self._may_thin(self._quantum):
            self._widen(2 * self._quantum)
            return True
        if not self._num_rows:
            return False
        self._has_slid = True
        gone = max(1, self._num_rows // _SLIDE)
        self._keep(np.arange(self._num_rows) >= gone)
        return True

    def _keep(self, stays: Array) -> None:
        rows = self._rows[: self._num_rows]
        keys = self._keys[: self._num_keys][np.repeat(stays, rows["lengths"][:, 0])]
        self._put(keys, rows[stays])

    def _thinned(self, keys: Array, rows: Array, quantum: int) -> tuple[Array, Array]:
        """Return what of prompts is in a sample with that quantum."""
        limits = np.array(
            [_limit(one.block_bytes, quantum) for one in self._spaces], dtype=np.uint64
        )
        mask = keys <= np.repeat(limits[rows["space"]], rows["lengths"][:, 0])
        if mask.all():
            return keys, rows
        rows = rows.copy()
        rows["lengths"] = sampled_lengths(rows["lengths"], mask)
        return keys[mask], rows[rows["lengths"][:, 0] > 0]

    def _put(self, keys: Array, rows: Array) -> None:
        self._num_keys, self._num_rows = len(keys), len(rows)
        self._keys[: len(keys)], self._rows[: len(rows)] = keys, rows


def _limit(block_bytes: int, quantum: int) -> int:
    return min(LIMIT_MAX, (block_bytes << 64) // quantum - 1)


def _trace_of(rows: Array, keys: Array) -> tuple[Trace, Array]:
    """Return prompts as a trace, and the number of each block's key."""
    names, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    ids = np.argsort(order)[inverse]
    num_keys = rows["lengths"][:, 0]
    starts = np.concatenate(([0], np.cumsum(num_keys)))
    places = np.arange(len(keys)) - np.repeat(starts[:-1], num_keys)
    at = firsts[order]
    trace = Trace(
        name="sample",
        block_tokens=1,
        times=rows["time"] - rows["time"][:1],
        starts=starts,
        ids=ids,
        num_tokens=num_keys,
        parents=np.where(places[at] > 0, ids[at - 1], NO_PARENT),
        depths=places[at],
    )
    return trace, names[order]
