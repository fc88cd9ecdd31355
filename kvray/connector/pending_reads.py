"""Counts the saves that still read each request's blocks."""

import threading
from collections import Counter


class PendingReads:
    """The engine's thread begins reads, the saver's ends them; `in` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()

    def begin(self, request_id: int) -> None:
        """Note that a save of the request begins to read."""
        with self._lock:
            self._counts[request_id] += 1

    def end(self, request_id: int) -> None:
        """Note that a save that began has read all it will."""
        with self._lock:
            self._counts[request_id] -= 1
            if self._counts[request_id] <= 0:
                del self._counts[request_id]

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._counts
