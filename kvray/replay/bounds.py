"""What no policy beats: a cache without an end, and Belady's optimum for a finite one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from kvray.replay.trace import Ints, Trace

_REPORT_EVERY = 1024
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most hits that a cache of some size can have."""

    num_blocks: int | None
    """The size; None is without an end."""
    refs: int
    prompt_tokens: int
    hit_blocks: int
    hit_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Blocks found over blocks asked for."""
        return self.hit_blocks / max(1, self.refs)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens in blocks that were found over tokens of all prompts."""
        return self.hit_tokens / max(1, self.prompt_tokens)


def infinite(trace: Trace) -> Bound:
    """Return what a cache that never evicts finds: every block but at its first use."""
    first = np.ones(trace.num_unique, dtype=np.int64)
    is_new = np.zeros(trace.num_refs, dtype=np.int64)
    is_new[np.unique(trace.ids, return_index=True)[1]] = first
    new_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_new)])[trace.starts]
    return _bound(trace, None, np.diff(trace.starts) - np.diff(new_before))


def belady(
    trace: Trace, num_blocks: int, *, progress: Callable[[int, int], None] | None = None
) -> Bound:
    """Return what a cache of `num_blocks` finds that knows the future.

    A block that is never used again goes at once; then the one whose next use is the farthest
    away, of those with the same next request the deepest. A parent is used whenever a child of it
    is, so it never goes before one.

    No policy has more hits: this is Belady's MIN with the right to keep a block out, which is
    optimal for single blocks, and the contiguous prefixes that count here are what it keeps. Its
    tokens are those of the most blocks.

    Args:
        trace: what is asked for.
        num_blocks: the size of the cache.
        progress: called with requests done and requests in all.
    """
    stretches = Stretches(trace)
    hits = _replay(stretches, num_blocks, progress or (lambda done, total: None))
    return _bound(trace, num_blocks, hits)


class Stretches:
    """A trace in stretches: longest runs of blocks that are always asked for together.

    What is used and evicted alike need not be looked at block by block: long prompts are a few
    stretches. A request asks for whole stretches.
    """

    def __init__(self, trace: Trace) -> None:
        """Cut the paths wherever a block has fewer uses than the one before it."""
        ids, starts = trace.ids, trace.starts
        uses = np.bincount(ids, minlength=trace.num_unique)[ids]
        begins = np.ones(len(ids), dtype=bool)
        begins[1:] = uses[1:] != uses[:-1]
        begins[starts[:-1][np.diff(starts) > 0]] = True
        at = np.flatnonzero(begins)
        self.heads: Ints = ids[at]
        """The first block of each stretch, which names it; shape [num_stretch_refs]."""
        self.lengths: Ints = np.diff(np.append(at, len(ids)))
        """Blocks of each stretch; [num_stretch_refs]."""
        self.starts: Ints = np.searchsorted(at, starts)
        """Where each request begins in the other two; [num_requests + 1]."""
        self.num_unique = trace.num_unique

    def next_uses(self) -> Ints:
        """Return where each stretch comes next, or `_NEVER`; shape [num_stretch_refs]."""
        order = np.argsort(self.heads, kind="stable")
        found = np.full(len(order), _NEVER)
        same = self.heads[order[1:]] == self.heads[order[:-1]]
        found[order[:-1][same]] = order[1:][same]
        return found


def _replay(stretches: Stretches, num_blocks: int, progress: Callable[[int, int], None]) -> Ints:
    """Return the hits of each request."""
    heads, lengths = stretches.heads.tolist(), stretches.lengths.tolist()
    next_uses, starts = stretches.next_uses().tolist(), stretches.starts.tolist()
    cached = [0] * stretches.num_unique
    """Blocks that are there of the stretch with that head, from its first one on."""
    farthest: list[int] = []
    """A heap of places in `heads`, negative. One that has passed lies below all that have not, so
    that it is never looked at: whatever is cached has its next use in here."""
    used, hits = 0, []
    for request, (start, end) in enumerate(pairwise(starts)):
        hit = 0
        for at in range(start, end):
            head = heads[at]
            here = cached[head]
            hit += here
            length = lengths[at] if next_uses[at] != _NEVER else 0
            cached[head] = length
            used += length - here
            if length:
                heappush(farthest, -next_uses[at])
        hits.append(hit)
        while used > num_blocks:
            head = heads[-farthest[0]]
            gone = min(cached[head], used - num_blocks)
            used -= gone
            cached[head] -= gone
            if not cached[head]:
                heappop(farthest)
        if request % _REPORT_EVERY == 0:
            progress(request, len(starts) - 1)
    progress(len(starts) - 1, len(starts) - 1)
    return np.array(hits, dtype=np.int64)


def _bound(trace: Trace, num_blocks: int | None, hits: Ints) -> Bound:
    return Bound(
        num_blocks=num_blocks,
        refs=trace.num_refs,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=int(hits.sum()),
        hit_tokens=trace.hit_tokens(hits),
    )
