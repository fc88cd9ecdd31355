"""Request traces, the bounds that no cache beats on them, and how policies compare."""

from kvray.lab.replay.reading import read_trace
from kvray.lab.replay.simulator import Comparison, Outcome, Plan, belady, compare, infinite
from kvray.store.replay import Trace

__all__ = ["Comparison", "Outcome", "Plan", "Trace", "belady", "compare", "infinite", "read_trace"]
