"""The lookup's index: block -> its parts -> the shards that hold them."""

from kvray.index.entry_codes import PARTS_MAX
from kvray.index.index import Index, Loss, Match, Run

__all__ = ["PARTS_MAX", "Index", "Loss", "Match", "Run"]
