"""The excerpts beside the tests, read once."""

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
