"""The lookup's index: which shards hold which parts of which block."""

from kvray.index.index import PARTS_MAX, Index, Loss, Match, Run

__all__ = ["PARTS_MAX", "Index", "Loss", "Match", "Run"]
