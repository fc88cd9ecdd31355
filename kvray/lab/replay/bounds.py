"""The bounds that no policy beats: an infinite cache, and Belady's optimum for a finite one."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from kvray.lab.replay.results import Outcome
from kvray.lab.replay.trace import Ints, Trace

_NEVER = np.iinfo(np.int64).max


def infinite(trace: Trace) -> Outcome:
    """Return what a cache that never evicts finds: every block but at its first use."""
    new = np.zeros(trace.num_refs + 1, dtype=np.int64)
    new[trace.first_places() + 1] = 1
    hits = np.diff(trace.starts) - np.diff(np.cumsum(new)[trace.starts])
    return Outcome.of(trace, hits, policy="infinite", host_blocks=None)


def belady(trace: Trace, num_blocks: int) -> Outcome:
    """Return what a cache of `num_blocks` finds that knows the future.

    A block that is never used again goes at once; then the one whose next use is the farthest
    away, and of those with the same next request the deepest. A parent is used whenever its child
    is, so it never goes before the child.

    No policy has more hits: this is Belady's MIN with the right to keep a block out, which is
    optimal for single blocks, and it always keeps contiguous prefixes, which alone count here.
    """
    stretches = _stretches(trace)
    next_uses = _next_uses(stretches[0]).tolist()
    heads, lengths, starts = (array.tolist() for array in stretches)
    cached = [0] * trace.num_unique
    """Of each stretch, by its head: how many of its blocks are there, from the first one on."""
    farthest: list[int] = []
    """A heap of next uses: negative places in `heads`. A place that has passed lies below all that
    have not, and is never looked at, as everything cached has its next use in here."""
    used, hits = 0, []
    for start, end in pairwise(starts):
        hit = 0
        for at in range(start, end):
            head = heads[at]
            here = cached[head]
            hit += here
            length = lengths[at] if next_uses[at] != _NEVER else 0
            cached[head] = length  # 0, and so evicted at once, if it is never used again
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
    found = np.array(hits, dtype=np.int64)
    return Outcome.of(trace, found, policy="belady", host_blocks=num_blocks)


def _stretches(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Cut a trace into stretches: the longest runs of blocks that are always asked for together.

    Such blocks are used and evicted alike, and a request asks for whole stretches. A long prompt is
    a few of them.

    Returns:
        The first block of each stretch, which names it, and its length, both of shape
        [num_stretch_refs]; where each request begins in the two, [num_requests + 1].
    """
    # A stretch ends wherever a block has fewer uses than the one before it.
    ids, starts = trace.ids, trace.starts
    uses = np.bincount(ids, minlength=trace.num_unique)[ids]
    begins = np.ones(len(ids), dtype=bool)
    begins[1:] = uses[1:] != uses[:-1]
    begins[starts[:-1][np.diff(starts) > 0]] = True
    at = np.flatnonzero(begins)
    return ids[at], np.diff(np.append(at, len(ids))), np.searchsorted(at, starts)


def _next_uses(heads: Ints) -> Ints:
    """Return where each stretch comes next, or `_NEVER`; shape [num_stretch_refs]."""
    order = np.argsort(heads, kind="stable")
    found = np.full(len(order), _NEVER)
    same = heads[order[1:]] == heads[order[:-1]]
    found[order[:-1][same]] = order[1:][same]
    return found
