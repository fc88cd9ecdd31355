"""One engine: a server that knows nothing of Ray, and the Serve replica that forwards to it."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from string import punctuation
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import h11
from ray import serve
from ray.util import get_node_ip_address

from kvray.actors.routers.pools import EVENTS_STAT
from kvray.config import CONFIG_ENV, load_config
from kvray.errors import KVRayError
from kvray.events.pool_feed import HttpDrain, PoolFeed
from kvray.routing import PREFILL_STAT, SLOWDOWN_STAT, PrefillSpeed
from kvray.serve.server import HOST, EngineServer, log_path
from kvray.serve.settings import Settings

_log = logging.getLogger("ray.serve")

REPLICA_PREFIX = "engine-"
_LEAVE_S = 5.0
"""How long this process may take to end after its engine."""
_CONNECT_S = 5.0
_HEALTH_S = 2.0
_HEAD_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 16
_DEFAULT_BLOCK = 32

Headers = list[tuple[bytes, bytes]]
_T = TypeVar("_T")

_HOP_BY_HOP = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization te trailer"
    b" transfer-encoding upgrade".split()
)
"""Headers that belong to one connection (RFC 9110, 7.6.1)."""


class Forwarded(NamedTuple):
    """A client's request, to be sent to an engine's server as it is."""

    method: str
    target: str
    """Path and query, as they came."""
    headers: Headers
    body: bytes


class Head(NamedTuple):
    """The beginning of an answer."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        """Whether events follow, one by one."""
        return any(value.startswith(b"text/event-stream") for _, value in self.headers)


def replica_name(serve_replica_id: str) -> str:
    """Return what kvray calls the engine of a Serve replica, whose id is unique and never again."""
    return REPLICA_PREFIX + serve_replica_id


class Engine:
    """A Serve replica with one engine; it ends with its engine.

    Serve's routers notice an ended process at once, and health checks only after three. Meanwhile
    it would have the shortest queue of all, get everything, and refuse it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str | None = None,
        leave: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """Start the engine and return when it is ready to answer.

        Args:
            settings: what it loads, and how.
            name: of the replica in kvray; None: by the id that Serve gave this replica.
            leave: ends this process; called on a thread of its own.

        Raises:
            KVRayError: it did not start; Serve tries again.
        """
        self._is_closing = False
        self._settings = settings
        self._num_open = 0  # requests under way; the loop's, as all that follows
        self._num_waiting = 0  # those of which nothing has come
        self._num_streams = 0
        self._heard_at = time.monotonic()  # of the server
        self._first_at = 0.0  # the latest first token
        self._speed = PrefillSpeed()
        self._feed: PoolFeed | None = None
        if name is None:
            name = replica_name(serve.get_replica_context().replica_id.unique_id)
        # The engine learns from its environment where the tier is, and what it is called there.
        env = {"KVRAY_CONNECTOR__REPLICA": name}  # besides what this node's Ray says of its arena
        if settings.kvray_config is not None:
            env[CONFIG_ENV] = str(settings.kvray_config)
        if settings.is_tiny and load_config(settings.kvray_config).connector.model_key is None:
            env["KVRAY_CONNECTOR__MODEL_KEY"] = settings.model  # it has no files to tell it by
        self._server = EngineServer(name, settings, env=env, log=log_path(name))
        try:
            self._server.wait_ready(settings.start_timeout_s)
            if settings.pool_events:
                options = settings.options()
                cache = options.get("kv_cache_config") or options
                self._feed = PoolFeed(
                    HttpDrain(self._server.url),
                    block_size=int(cache.get("tokens_per_block", _DEFAULT_BLOCK)),
                    host=str(get_node_ip_address()),  # type: ignore[no-untyped-call]
                )
        except BaseException:
            self._server.close()
            raise
        # The thread reads what does not change, and whether this object closes.
        threading.Thread(target=self._watch, args=(leave,), name="kvray-watch", daemon=True).start()

    async def forward(
        self, asked: Forwarded, num_computed: int | None = None
    ) -> AsyncIterator[str | Head | bytes]:
        """Yield this engine's name once it has the request, then the answer as it comes.

        The answer is its head, its bytes in pieces, and no bytes at the end. If the caller stops
        listening the connection is closed, and the server ends the request.
        `num_computed`: tokens of the prompt that the engine most likely has to compute.

        Raises:
            KVRayError: the server broke off, or does not answer.
        """
        began, is_first, is_stream = time.monotonic(), True, False
        if not self._num_open:
            self._heard_at = began
        self._num_open += 1
        self._num_waiting += 1
        try:
            yield self._server.name
            async with contextlib.aclosing(_exchange(self._server.port, asked)) as answer:
                async for one in answer:
                    now = time.monotonic()
                    if isinstance(one, Head):
                        is_stream = one.is_stream
                        if is_stream and not self._num_streams:
                            self._heard_at = now
                        self._num_streams += is_stream
                        yield one
                        continue
                    self._heard_at = now
                    if is_first:
                        num_answering = self._num_open - self._num_waiting
                        # The first prompt loads and compiles; who then looks slow gets no other.
                        if is_stream and num_computed is not None and self._first_at:
                            alone_s = now - max(began, self._first_at)
                            self._speed.note(num_computed, alone_s, num_answering)
                        is_first, self._first_at = False, now
                        self._num_waiting -= 1
                    yield one
            yield b""
        except (h11.ProtocolError, OSError, asyncio.TimeoutError) as error:
            # If it has died this process ends first, and Serve tells the caller so.
            if not await asyncio.to_thread(self._server.is_well, timeout_s=1.0):
                await asyncio.sleep(_LEAVE_S)
            raise KVRayError(f"{self._server.name} broke off ({type(error).__name__}).") from None
        finally:
            self._num_open -= 1
            self._num_waiting -= is_first
            self._num_streams -= is_stream

    def record_routing_stats(self) -> dict[str, Any]:
        """Tell the router how fast this engine computes prompts, and where its events are heard.

        Serve asks now and then.
        """
        speed, feed = self._speed, self._feed
        stats = {PREFILL_STAT: speed.tokens_per_s, SLOWDOWN_STAT: speed.decode_slowdown}
        return stats if feed is None else {**stats, EVENTS_STAT: feed.metadata}

    async def check_health(self) -> None:
        """Have Serve start another replica when the engine hangs.

        A long answer that is no stream is silent to its end: then the server is asked.

        Raises:
            KVRayError: it does.
        """
        silent_s = time.monotonic() - self._heard_at
        if silent_s <= self._settings.stall_timeout_s:
            return
        is_late = self._num_streams or (
            self._num_open and silent_s > self._settings.request_timeout_s
        )
        if not is_late and await asyncio.to_thread(self._server.is_well, timeout_s=_HEALTH_S):
            return
        raise KVRayError(
            f"The engine {self._server.name} has said nothing for {silent_s:.0f} s, with"
            f" {self._num_open} requests under way; it is replaced."
        )

    def _watch(self, leave: Callable[[], None]) -> None:
        """End this process when its engine has ended by itself."""
        self._server.process.wait()
        if not self._is_closing:
            _log.error("The engine %s has died; its replica ends.", self._server.name)
            self._server.close()  # a keeper that was killed has left its directory
            leave()

    def __del__(self) -> None:
        """End the engine with this replica."""
        self._is_closing = True
        if self._feed is not None:
            self._feed.close()
        with contextlib.suppress(AttributeError):  # it was never started
            self._server.close()


async def in_time(answer: Awaitable[_T], seconds: float) -> _T:
    """Return an answer as `asyncio.wait_for` does.

    Before Python 3.12 that forgets a cancellation which comes with the answer: an engine would
    write on for a client that has gone.
    """
    asked = asyncio.ensure_future(answer)
    try:
        if not (await asyncio.wait({asked}, timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return asked.result()
    except BaseException:
        asked.cancel()
        # Serve's answers fail once they are cancelled: nobody is to find that in a log.
        asked.add_done_callback(lambda one: one.cancelled() or one.exception())
        raise


def _end_to_end(headers: Headers) -> Headers:
    """Return what is not of one connection alone: all but what `Connection` names, and its like."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    dropped = _HOP_BY_HOP | {one.strip().lower() for one in named.split(b",")}
    return [one for one in headers if one[0].lower() not in dropped]


def request_of(asked: Forwarded) -> h11.Request:
    """Return what the server gets before a body.

    Raises:
        h11.LocalProtocolError: HTTP has no such request.
    """
    headers = [one for one in _end_to_end(asked.headers) if one[0] != b"content-length"]
    if not any(name == b"host" for name, _ in headers):  # HTTP/1.0
        headers.append((b"host", HOST.encode()))
    if asked.body or asked.method not in ("GET", "HEAD"):
        headers.append((b"content-length", str(len(asked.body)).encode()))
    headers.append((b"connection", b"close"))
    target = quote(asked.target, safe=punctuation, encoding="latin-1")
    return h11.Request(method=asked.method, target=target, headers=headers)


async def _exchange(port: int, asked: Forwarded) -> AsyncGenerator[Head | bytes, None]:
    """Yield the answer of a server of this node: its head, then its bytes as they come.

    On a connection of its own: a server may end one that was idle while it gets a request.
    """
    talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
    said = [
        talk.send(request_of(asked)),
        talk.send(h11.Data(data=asked.body)),
        talk.send(h11.EndOfMessage()),
    ]
    reader, writer = await in_time(asyncio.open_connection(HOST, port), _CONNECT_S)
    try:
        writer.writelines(filter(None, said))  # not waited for: a refusal may come before
        while True:
            pieces = []
            while isinstance(event := talk.next_event(), h11.Data):
                pieces.append(event.data)
            if pieces:
                yield b"".join(pieces)
            if event is h11.NEED_DATA:
                talk.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                yield Head(event.status_code, _end_to_end(event.headers.raw_items()))
            elif not isinstance(event, h11.InformationalResponse):
                return
    finally:
        writer.transport.abort()
