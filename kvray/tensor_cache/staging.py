"""Stages blocks that this node's arena lacks: from the node's disk, or from other nodes.

`StoreQueue` is a bounded queue of stores that nobody waits for.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvray.identity.block import BlockKey
from kvray.node import NodeLink, Registration, StageCalls, StageReply


class Staging:
    """Has the node's shard bring blocks into the arena; used by any thread.

    One call is under way at a time: the holder of `_turn` has the connection. A call that waits too
    long for it goes on with the blocks that are here.
    """

    def __init__(self, link: NodeLink, registration: Registration) -> None:
        self._link = link
        self._registration = registration
        self._calls = StageCalls(link.directory)
        self._turn = threading.Lock()

    def stage(self, keys: Sequence[BlockKey], *, wait_s: float) -> StageReply:
        """Return how much of `keys` is in the arena after `wait_s` at most.

        Late blocks still arrive, in the background. The shard keeps staged blocks for
        `staging.handover_s`; the caller leases them before that ends.
        """
        if self._link.arena is None:
            return StageReply(num_blocks=0, reason="store_down")
        if wait_s <= 0 or not self._registration.has_peers:
            return StageReply(num_blocks=0, reason="not_stored")
        until = time.monotonic() + wait_s
        if not self._turn.acquire(timeout=wait_s):
            return StageReply(num_blocks=0, reason="too_slow")
        try:
            if not self._calls.can_ask:
                return StageReply(num_blocks=0, reason="store_down")
            return self._calls.stage(
                keys,
                replica=self._registration.replica,
                rank=self._registration.rank,
                wait_s=max(0.0, until - time.monotonic()),
                tokens_per_s=0.0,  # nobody knows how long computing them would take
            )
        finally:
            self._turn.release()

    def close(self) -> None:
        """Hang up; nobody may be inside `stage`."""
        self._calls.close()


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
