"""What one engine counts and notes, for its shard to show."""

import time
from collections import Counter

from kvray.connector.figures.call_times import CallTimes
from kvray.connector.figures.dropped_blocks import DroppedBlocks
from kvray.node import PrefixDigests, RequestNotes


class EngineFigures:
    """Of one engine, both halves together."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.dropped = DroppedBlocks(self.totals)
        self.call_times = CallTimes()
        self.prefix_digests = PrefixDigests()
        self.request_notes = RequestNotes()
        self._began_at = time.monotonic()

    def counters(self) -> dict[str, int]:
        """Return what the shard is told: totals, how long calls took, and since when."""
        return {
            **self.prefix_digests.counted(dict(self.totals), "miss_tokens_not_stored"),
            **self.call_times.counters(),
            "uptime_s": int(time.monotonic() - self._began_at),
        }
