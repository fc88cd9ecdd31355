"""Publishes what an engine's own pool has, from the events that the engine is asked for.

A thread of its own asks, translates and publishes. The engine's threads only put events into a
buffer, which is the engine's and bounded.

`HttpDrain` takes the events of TensorRT-LLM's own server, `POST /kv_cache_events`.
"""

import http.client
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvray.errors import TransferError
from kvray.events.message import AllBlocksCleared, Event
from kvray.events.native import NativePool
from kvray.events.publisher import ZmqPublisher
from kvray.events.zmtp import endpoint

_log = logging.getLogger(__name__)
_POLL_S, _BUSY_S = 0.05, 0.002
_AGAIN_S = 1.0
_EVENTS = 64  # in a batch
IS_WHOLE = "is_whole"
"""In a feed's metadata: False once an event is lost. The pool may then have what no event tells;
`AllBlocksCleared` cannot say so."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An engine is of this node, whatever `http_proxy` says."""


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
        self._publisher = ZmqPublisher(self._pool, first=time.time_ns() // 1_000_000)
        try:
            live, replay = self._publisher.bind(endpoint(host, 0), endpoint(host, 0))
        except BaseException:
            self._publisher.close()
            raise
        self.metadata = {
            "endpoint": live,
            "replay_endpoint": replay,
            "block_size": block_size,
            "dp_rank": 0,
            IS_WHOLE: True,
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
            while not self._is_over.wait(_BUSY_S if self._publisher.is_busy else _POLL_S):
                try:
                    self._publish(self._pool.take(self._drained()))
                    self._publisher.serve(time.monotonic())
                except Exception:  # noqa: BLE001 - a defect must not end what routers hear
                    _log.exception("KV events begin again, after a defect")
                    self._pool.clear()
                    self.metadata[IS_WHOLE] = False
                    self._publisher.publish([AllBlocksCleared()])
                    self._is_over.wait(_AGAIN_S)
        finally:
            self._publisher.close()

    def _publish(self, events: Sequence[Event]) -> None:
        for start in range(0, len(events), _EVENTS):
            self._publisher.publish(events[start : start + _EVENTS])
        if self._pool.num_gaps > self._num_gaps:
            self._num_gaps = self._pool.num_gaps
            self.metadata[IS_WHOLE] = False
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


_TIMEOUT_S = 4.0  # 1.x waits two seconds for an event before it answers that there is none
_BYTES_MAX = 64 * 2**20
_PIECE = 2**16


class HttpDrain:
    """Empties a server's buffer at each call, for a `PoolFeed`; there can be one such reader."""

    def __init__(self, url: str) -> None:
        """Ask the server at `url`, such as `http://127.0.0.1:8000`."""
        self._request = urllib.request.Request(
            f"{url.rstrip('/')}/kv_cache_events", data=b"", method="POST"
        )

    def __call__(self) -> list[Any]:
        """Return the events since the last call.

        TransferError: the server does not answer with a list of events.
        """
        try:
            with _DIRECT.open(self._request, timeout=_TIMEOUT_S) as answer:
                kind = answer.headers.get_content_type()
                if kind == "text/event-stream":
                    raise TransferError(
                        "This server streams the hashes of blocks without their tokens, and no"
                        " prompt can be found by them; use its ZMQ publisher."
                    )
                found = json.loads(_body(answer, time.monotonic() + _TIMEOUT_S))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise TransferError(f"{self._request.full_url} gives no KV events ({error}).") from None
        if not isinstance(found, list):
            raise TransferError(f"{self._request.full_url} gives {type(found).__name__}, no list.")
        return found


def _body(answer: http.client.HTTPResponse, until: float) -> bytes:
    """Return an answer's body; TimeoutError or ValueError: it has no end, in time or in bytes."""
    body = bytearray()
    while piece := answer.read1(_PIECE):
        body += piece
        if len(body) > _BYTES_MAX:
            raise ValueError(f"more than {_BYTES_MAX >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("it takes too long")
    return bytes(body)
