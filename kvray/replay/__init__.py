"""Request traces, what no cache could beat on them, and how policies compare."""

from kvray.replay.bounds import Bound, belady, infinite
from kvray.replay.comparison import Comparison, Plan, Simulate, Simulator, compare
from kvray.replay.reading import read_trace
from kvray.replay.results import Outcome
from kvray.replay.trace import Trace

__all__ = [
    "Bound",
    "Comparison",
    "Outcome",
    "Plan",
    "Simulate",
    "Simulator",
    "Trace",
    "belady",
    "compare",
    "infinite",
    "read_trace",
]
