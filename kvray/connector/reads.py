"""Which requests' blocks are still being read by saves."""

import threading
from collections import Counter


class Reads:
    """Begun by the engine's thread and ended by the saver's; asking takes no lock."""

    def __init__(self) -> None:
        """Start with none."""
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
