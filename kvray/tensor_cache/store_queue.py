"""A bounded queue of stores that nobody waits for."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_log = logging.getLogger("kvray.tensor_cache")


class StoreQueue:
    """Does one action after the other in the background; any thread may call any method.

    It holds at most `saves_max` actions of `bytes_max` bytes; a single one may have any size. What
    crosses to its thread: closures that own all they touch.
    """

    def __init__(self, *, saves_max: int, bytes_max: int) -> None:
        self._saves_max = saves_max
        self._bytes_max = bytes_max
        self._executor = ThreadPoolExecutor(1, "kvray-saver")
        self._lock = threading.RLock()
        self._sizes: dict[Future[None], int] = {}
        self._closed = False

    def has_room(self, size: int) -> bool:
        """Return whether `submit` would take `size` bytes now."""
        with self._lock:
            self._sizes = {one: size for one, size in self._sizes.items() if not one.done()}
            num_waiting = sum(not one.running() for one in self._sizes)
            used = sum(self._sizes.values())
            has_bytes = used == 0 or used + size <= self._bytes_max
            return not self._closed and num_waiting < self._saves_max and has_bytes

    def submit(self, size: int, action: Callable[[], None]) -> bool:
        """Do `action`, which keeps `size` bytes, soon; False: too much is waiting already."""
        with self._lock:
            if not self.has_room(size):
                return False
            self._sizes[self._executor.submit(_run, action)] = size
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or under way; False: not within `timeout_s`."""
        with self._lock:
            pending = list(self._sizes)
        return not wait(pending, timeout_s).not_done

    def close(self, timeout_s: float) -> int:
        """Do what is waiting and end the thread; return how much was given up for lack of time.

        An action that is under way at the deadline goes on.
        """
        with self._lock:
            self._closed = True
        self.flush(timeout_s)
        given_up = sum(one.cancel() for one in self._sizes)
        self._executor.shutdown(wait=self.flush(0))
        return given_up


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - a defect; what waits is stored all the same
        _log.exception("kvray: a defect while KV was stored in the background")
