"""Replays a trace of requests through the policies of a tier, in virtual time and without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvray.store import policy as policies
from kvray.store.arena.eviction import leaves_first
from kvray.store.arena.tables import Array
from kvray.store.policy import Policy, Use

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

NO_PARENT = -1
NOWHERE = -1
_RANKED_SHARE, RANKED_MIN = 0.05, 96
"""Blocks that are ranked at a time."""


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


class Replay:
    """A host tier with a disk below it, and the hits of every request in each.

    A demoted block stays on disk when it is promoted, so it is not written twice.
    """

    def __init__(
        self,
        trace: Trace,
        policy: str,
        host_blocks: int,
        nvme_blocks: int = 0,
        *,
        admission: str = "all",
        ranked_min: int = RANKED_MIN,
    ) -> None:
        """Start with both empty; without `nvme_blocks` nothing is demoted.

        At least `ranked_min` blocks of a tier are ranked at a time: fewer in a small model of one.
        """
        ranking = policies.POLICIES[policy](host_blocks)
        self.host = Tier(trace, ranking, host_blocks, ranked_min=ranked_min)
        below = ranking.beside(nvme_blocks)
        self.disk = Tier(trace, below, nvme_blocks, ranked_min=ranked_min)
        self.host_hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.disk_hits = np.zeros_like(self.host_hits)
        self.num_written = 0
        self._trace = trace
        self._admission = policies.ADMISSIONS[admission](host_blocks, ranking)
        self._to_promote = trace.ids[:0]
        """Blocks of the present request that stay on disk in any case."""
        if nvme_blocks:
            self.host.leaving = self._demote

    def run(self) -> Iterator[int]:
        """Make all requests; yield the number of each before it is made."""
        for request in range(self._trace.num_requests):
            yield request
            self._make(request)

    def _make(self, request: int) -> None:
        """Look a request's blocks up, promote those on disk, and store those that are nowhere."""
        start, end = self._trace.starts[request : request + 2]
        ids, now = self._trace.ids[start:end], float(self._trace.times[request])
        host, disk = self.host, self.disk
        hits = _leading(host.has(ids))
        found = hits + _leading(disk.has(ids[hits:]))
        self.host_hits[request], self.disk_hits[request] = hits, found - hits
        host.use(ids)
        disk.use(ids[:found])
        self._to_promote = ids[hits:found]
        missing = len(ids) - hits - host.num_free
        if missing > 0:
            host.make_room(missing, protect=ids[:hits], now=now)
        stop = min(len(ids), hits + host.num_free)
        found = min(found, stop)
        host.store(ids[hits:stop])
        host.policy.copied(host.slots[ids[hits:found]], disk.policy, disk.slots[ids[hits:found]])
        self._tell(ids[:stop], found, len(ids), now)

    def _tell(self, ids: Array, found: int, length: int, now: float) -> None:
        """Tell the policies of a request's blocks in the host tier, of which `found` were found."""
        slots = self.host.slots[ids]
        if found:
            use = Use(slots[:found], ids[:found], 0, length, now)
            self.host.policy.used(use)
            self._admission.used(use)
            self._copy_facts(ids[:found])
        if found < len(ids):
            parent = int(slots[found - 1]) if found else NOWHERE
            use = Use(slots[found:], ids[found:], found, length, now, parent)
            self.host.policy.stored(use)
            self._admission.stored(use)

    def _copy_facts(self, blocks: Array) -> None:
        """Hand the disk's policy what the host's knows of those of `blocks` that both have."""
        both = blocks[self.disk.has(blocks) & self.host.has(blocks)]
        self.disk.policy.copied(self.disk.slots[both], self.host.policy, self.host.slots[both])

    def _demote(self, going: Array, now: float) -> None:
        """Write the admitted ones of blocks that leave the host tier, with all their ancestors."""
        new = going[~self.disk.has(going)]
        if len(new):
            mask = self._admission.admits(self.host.slots[new], new, now=now)
            # Children leave before their parents: the first one mostly brings its whole prompt.
            for block in new[mask].tolist():
                if self.disk.slots[block] == NOWHERE:
                    self._write(self._path_to(block), now)

    def _write(self, path: Array, now: float) -> None:
        """Write the missing blocks of a path from the root."""
        disk, num_here = self.disk, _leading(self.disk.has(path))
        before, missing = path[:num_here], path[num_here:]
        disk.use(path)
        short = len(missing) - disk.num_free
        if short > 0:
            disk.make_room(short, protect=np.concatenate((before, self._to_promote)), now=now)
        missing = missing[: disk.num_free]
        disk.store(missing)
        self._copy_facts(missing)
        self.num_written += len(missing)

    def _path_to(self, block: int) -> Array:
        path = []
        while block != NO_PARENT:
            path.append(block)
            block = int(self._trace.parents[block])
        return np.array(path[::-1])


def _leading(mask: Array) -> int:
    """Return how many of the first ones are set, one after the other."""
    return len(mask) if mask.all() else int(mask.argmin())


class Tier:
    """The blocks of a trace in one tier; each is here with all its ancestors.

    Blocks go in the order of the last ranking. Those used since stay, and so do their ancestors,
    which were used with them.
    """

    def __init__(
        self, trace: Trace, policy: Policy, num_blocks: int, *, ranked_min: int = RANKED_MIN
    ) -> None:
        self.policy = policy
        self.slots: Array = np.full(trace.num_unique, NOWHERE, dtype=np.int64)
        """Of each block; the policy knows blocks by their slots."""
        self.leaving: Callable[[Array, float], None] = lambda going, now: None
        """Takes blocks that are about to go, and the time."""
        self._parents, self._depths = trace.parents, trace.depths
        self._blocks = np.full(num_blocks, NOWHERE, dtype=np.int64)
        self._free = list(range(num_blocks))
        self._step = max(ranked_min, int(_RANKED_SHARE * num_blocks))
        # The next block to go is the last one.
        self._ranked: list[int] = []
        self._num_rankings = 0
        self._used_after = np.full(trace.num_unique, -1, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Blocks for which there is room."""
        return len(self._free)

    def has(self, blocks: Array) -> Array:
        """Return a mask of the `blocks` that are here."""
        mask: Array = self.slots.take(blocks) != NOWHERE
        return mask

    def use(self, blocks: Array) -> None:
        """Note that blocks and all their ancestors were used: they stay, as far as they can."""
        self._used_after[blocks] = self._num_rankings

    def store(self, blocks: Array) -> None:
        """Put blocks, for which there is room, here; the caller tells the policy."""
        first = len(self._free) - len(blocks)
        slots = self._free[first:]
        del self._free[first:]
        self.slots[blocks] = slots
        self._blocks[slots] = blocks

    def make_room(self, count: int, *, protect: Array, now: float) -> None:
        """Let `count` blocks go, or as many as can; `protect` and its ancestors stay."""
        count -= self._let_go(count, now)
        if count > 0:
            self._rank(max(count, self._step), protect, now)
            self.use(protect)
            self._let_go(count, now)

    def _rank(self, count: int, protect: Array, now: float) -> None:
        slots = np.flatnonzero(self._blocks != NOWHERE)
        above = self._parents[self._blocks[slots]]
        parents = np.where(above == NO_PARENT, NOWHERE, self.slots[above])
        num_children = np.bincount(parents[parents != NOWHERE], minlength=len(self._blocks))
        can_go = np.ones(len(self._blocks), dtype=bool)
        can_go[self.slots[protect]] = False
        parents, slots = parents[can_go[slots]], slots[can_go[slots]]
        going = leaves_first(
            slots,
            self.policy.rank(slots, now=now),
            parents=parents,
            num_children=num_children[slots],
            depths=self._depths[self._blocks[slots]],
        )
        self._ranked = self._blocks[going[:count]][::-1].tolist()
        self._num_rankings += 1

    def _let_go(self, count: int, now: float) -> int:
        """Let the next `count` blocks go, or as many as are ranked; return how many."""
        found: list[int] = []
        while self._ranked and len(found) < count:
            block = self._ranked.pop()
            if self._used_after[block] != self._num_rankings:
                found.append(block)
        if found:
            going = np.array(found)
            self.leaving(going, now)
            slots = self.slots[going]
            self.slots[going] = self._blocks[slots] = NOWHERE
            self._free += slots.tolist()
        return len(found)
