"""The bounds that no policy beats: an infinite cache, and Belady's optimum for a finite one."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from kvray.lab.replay.results import Outcome
from kvray.store.replay.trace import Ints, Trace

_NEVER = np.iinfo(np.int64).max


def infinite(trace: Trace) -> Outcome:
    """Return what a cache that never evicts finds: every block but at its first use."""
    is_first = np.zeros(trace.num_refs + 1, dtype=np.int64)
    is_first[1 + np.unique(trace.ids, return_index=True)[1]] = 1
    hits = np.diff(trace.starts) - np.diff(np.cumsum(is_first)[trace.starts])
    return Outcome.of(trace, hits, policy="infinite", host_blocks=None)


def belady(trace: Trace, num_blocks: int) -> Outcome:
    """Return what a cache of `num_blocks` finds that knows the future.

    A block that is never used again goes at once; then the one whose next use is the farthest
    away, and of those with the same next request the deepest. A parent is used whenever its child
    is, so it never goes before the child.

    No policy has more hits: this is Belady's MIN with the right to keep a block out, which is
    optimal for single blocks, and it always keeps contiguous prefixes, which alone count here.
    """
    ids, next_uses = trace.ids.tolist(), _next_uses(trace.ids).tolist()
    is_cached = [False] * trace.num_unique
    farthest: list[int] = []
    """A heap of next uses: negative places in `ids`. A place that has passed lies below all that
    have not, and is never looked at, as everything cached has its next use in here."""
    used, hits = 0, []
    for start, end in pairwise(trace.starts.tolist()):
        hit = 0
        for at in range(start, end):
            block, is_used_again = ids[at], next_uses[at] != _NEVER
            hit += is_cached[block]
            used += is_used_again - is_cached[block]
            is_cached[block] = is_used_again
            if is_used_again:
                heappush(farthest, -next_uses[at])
        hits.append(hit)
        while used > num_blocks:
            is_cached[ids[-heappop(farthest)]] = False
            used -= 1
    found = np.array(hits, dtype=np.int64)
    return Outcome.of(trace, found, policy="belady", host_blocks=num_blocks)


def _next_uses(ids: Ints) -> Ints:
    """Return where each block comes next, or `_NEVER`; shape [num_refs]."""
    order = np.argsort(ids, kind="stable")
    found = np.full(len(order), _NEVER)
    same = ids[order[1:]] == ids[order[:-1]]
    found[order[:-1][same]] = order[1:][same]
    return found
