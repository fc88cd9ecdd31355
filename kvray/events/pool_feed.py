"""Publishes what an engine's own pool has, from the events that the engine is asked for.

A thread of its own asks, translates and publishes. The engine's threads only put events into a
buffer, which is the engine's and bounded.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvray.events.message import AllBlocksCleared, Event
from kvray.events.native import NativePool
from kvray.events.outlet import Outlet
from kvray.events.zmtp import endpoint

_log = logging.getLogger(__name__)
_POLL_S, _BUSY_S = 0.05, 0.002
_AGAIN_S = 1.0
_EVENTS = 64  # in a batch


class PoolFeed:
    """A publisher for routers, on two free ports of an address."""

    def __init__(self, drain: Callable[[], Iterable[Any]], *, block_size: int, host: str) -> None:
        """Begin to publish.

        Args:
            drain: returns the engine's events since the last call, in any form that `NativePool`
                takes, and does not wait for more; called on the feed's thread.
            block_size: the engine's tokens in a block.
            host: address of this node that routers reach.

        Raises:
            ConfigError: it is none of this node's.
        """
        self._drain = drain
        self._pool = NativePool(block_size=block_size)
        # Above the numbers of a publisher that had these ports before.
        self._outlet = Outlet(self._pool, first=time.time_ns() // 1_000_000)
        try:
            live, replay = self._outlet.bind(endpoint(host, 0), endpoint(host, 0))
        except BaseException:
            self._outlet.close()
            raise
        self.metadata = {
            "endpoint": live,
            "replay_endpoint": replay,
            "block_size": block_size,
            "dp_rank": 0,
        }
        """What a router is told, as `kv_event_metadata` of the replica's routing statistics."""
        self._has_failed = False
        self._num_gaps = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-pool-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing. Twice is fine."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_BUSY_S if self._outlet.is_busy else _POLL_S):
                try:
                    self._publish(self._pool.take(self._drained()))
                    self._outlet.serve(time.monotonic())
                except Exception:  # noqa: BLE001 - a defect must not end what routers hear
                    _log.exception("KV events begin again, after a defect")
                    self._pool.clear()
                    self._outlet.publish([AllBlocksCleared()])
                    self._is_over.wait(_AGAIN_S)
        finally:
            self._outlet.close()

    def _publish(self, events: Sequence[Event]) -> None:
        for start in range(0, len(events), _EVENTS):
            self._outlet.publish(events[start : start + _EVENTS])
        if self._pool.num_gaps > self._num_gaps:
            self._num_gaps = self._pool.num_gaps
            _log.warning(
                "The engine has lost KV events, and routers know nothing of its pool's older"
                " blocks; raise event_buffer_max_size."
            )

    def _drained(self) -> Iterable[Any]:
        try:
            found = [*self._drain()]
        except Exception as error:  # noqa: BLE001 - the engine has none yet, or its own defect
            if not self._has_failed:
                self._has_failed = True
                _log.info("The engine gives no KV events yet: %r", error)
            return ()
        self._has_failed = False
        return found
