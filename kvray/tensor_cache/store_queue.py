"""A bounded queue of stores that nobody waits for; the first one starts its thread."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("kvray.tensor_cache")


class StoreQueue:
    """Does one action after the other in the background; any thread may call any method.

    It holds at most `saves_max` actions of `bytes_max` bytes; a single one may have any size. What
    crosses to the thread: closures that own all they touch.
    """

    def __init__(self, *, saves_max: int, bytes_max: int) -> None:
        self._saves_max = saves_max
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def has_room(self, size: int) -> bool:
        """Return whether `submit` would take `size` bytes now."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._saves_max:
                return False
            return self._bytes == 0 or self._bytes + size <= self._bytes_max

    def submit(self, size: int, action: Callable[[], None]) -> bool:
        """Do `action`, which keeps `size` bytes, soon; False: too much is waiting already."""
        with self._changed:
            if not self.has_room(size):
                return False
            self._waiting.append((size, action))
            self._bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvray-saver", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or under way; False: not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> int:
        """Do what is waiting and end the thread; return how much was given up for lack of time.

        An action that is under way at the deadline goes on.
        """
        deadline = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._changed:
            given_up = len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        return given_up

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            size, action = taken
            try:
                action()
            except Exception:  # noqa: BLE001 - a defect; what waits is stored all the same
                _log.exception("kvray: a defect while KV was stored in the background")
            finally:
                with self._changed:
                    self._bytes = max(0, self._bytes - size)
                    self._busy = False
                    self._changed.notify_all()
            del action, taken  # lets go of the tensors while this thread waits

    def _take(self) -> tuple[int, Callable[[], None]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()
