"""The excerpts beside the tests, read once, and LRU in plain Python to compare replays with."""

from collections import OrderedDict
from functools import cache
from pathlib import Path

from kvray.lab.replay import Trace, read_trace

DATA = Path(__file__).parent / "data"
CONVERSATION, SYNTHETIC = DATA / "conversation.jsonl.gz", DATA / "synthetic.jsonl.gz"
SESSIONS = DATA / "sessions.tar.xz"


@cache
def excerpt(path: Path) -> Trace:
    """Return the trace in one of the files."""
    return read_trace(path)


def lru_hits(trace: Trace, num_blocks: int) -> list[int]:
    """Return the hits of each request: blocks of the contiguous prefix that is there.

    A request's blocks are refreshed leaf first, so that roots are the youngest.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for start, end in zip(trace.starts[:-1], trace.starts[1:], strict=True):
        blocks = trace.ids[start:end].tolist()
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
