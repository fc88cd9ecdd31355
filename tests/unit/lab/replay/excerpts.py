"""Traces: excerpts beside the tests, made ones; and LRU in plain Python to compare with."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from kvray.lab.replay import Trace, read_trace
from kvray.lab.replay.reading import TraceBuilder

DATA = Path(__file__).parent / "data"
CONVERSATION, SYNTHETIC = DATA / "conversation.jsonl.gz", DATA / "synthetic.jsonl.gz"
SESSIONS = DATA / "sessions.tar.xz"


@cache
def excerpt(path: Path) -> Trace:
    return read_trace(path)


def made(*requests: tuple[float, Sequence[int]], block_tokens: int = 4) -> Trace:
    builder = TraceBuilder(name="made", block_tokens=block_tokens)
    for time_s, ids in requests:
        builder.add(time_s=time_s, num_tokens=block_tokens * len(ids), ids=list(ids))
    return builder.build()


def random_trace(seed: int, *, num_requests: int = 60) -> Trace:
    """Return requests that go down a tree, each node of which has up to three children."""
    rng = random.Random(seed)
    builder = TraceBuilder(name="random", block_tokens=4)
    for at in range(num_requests):
        path, node = [], 0
        for _ in range(rng.randrange(8)):
            node = 3 * node + rng.choice((1, 1, 1, 2, 3))
            path.append(node)
        cut = rng.randrange(4) if path else 0
        builder.add(time_s=at, num_tokens=4 * len(path) - cut, ids=path)
    return builder.build()


def paths(trace: Trace) -> list[list[int]]:
    """Return the blocks of each request."""
    return [part.tolist() for part in np.split(trace.ids, trace.starts[1:-1])]


def lru_hits(trace: Trace, num_blocks: int) -> list[int]:
    """Return the hits of each request: blocks of the contiguous prefix that is there.

    A request's blocks are refreshed leaf first, so that roots are the youngest.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks in paths(trace):
        found = 0
        while found < len(blocks) and blocks[found] in cached:
            found += 1
        hits.append(found)
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hits
