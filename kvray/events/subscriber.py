"""Follows publishers of KV events, on one thread, and keeps what each of them has.

A connection that is lost is made again, and followed by a question for the last batch; so is a long
silence. So what was lost without a later batch is found, too, and a publisher that has restarted.

Of a publisher there is one message in memory that is not whole, the batches that wait for a replay,
and its blocks, each of bounded size. What it sends beyond that waits on its own side.
"""

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvray.errors import ConfigError, TransferError
from kvray.events.message import END, pack_sequence, unpack_sequence
from kvray.events.pool_content import PoolContent
from kvray.events.reception import Reception
from kvray.events.zmtp import Wire, parse_endpoint, prepare

_log = logging.getLogger(__name__)

_MESSAGE_MAX = 8 * 2**20
_PENDING_MAX, _PENDING_BYTES = 10_000, 16 * 2**20
_READ_BYTES = 64 * 2**10  # of one connection before others have their turn
_POLL_S = 0.1
_SHARE = 0.5  # of a core, for the thread, however much publishers send
_ROUND_S = 0.002
_CHECK_S = 10.0
_REPLAY_S = 5.0  # how long a replay may bring nothing
_RETRY_S, _RETRY_MAX_S = 1.0, 30.0
_CONNECT_S = 10.0  # how long a publisher may take to be there
_RECONNECT_S, _RECONNECT_MAX_S = 0.1, 5.0
_FAILURES_SAID = 5  # in a row, before the log has a word of it
_RESOLVERS = 4  # names that are looked up at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The addresses of one publisher."""

    endpoint: str
    replay_endpoint: str | None = None
    """None: it answers no questions, and what is lost stays lost."""
    topic: str = ""


class Subscriber:
    """Any number of publishers by name; `follow` and `content` are for any thread."""

    def __init__(self, *, blocks_max: int) -> None:
        """Keep at most so many blocks of each publisher."""
        self._blocks_max = blocks_max
        self._sources: dict[str, Source] = {}
        # The thread changes it; others look names up.
        self._feeds: dict[str, _Feed] = {}
        self._past = Counter(applied=0, gap=0, lost=0)  # of those that are followed no longer
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, sources: Mapping[str, Source]) -> None:
        """Follow these publishers from now on, and no others."""
        self._sources = dict(sources)
        if self._sources and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvray-events", daemon=True)
            self._thread.start()

    def content(self, name: str) -> PoolContent | None:
        """Return what a publisher has; None: it is not followed, or not yet."""
        feed = self._feeds.get(name)
        return None if feed is None else feed.reception.content

    def totals(self) -> dict[str, int]:
        """Return how many batches came, gaps that were seen, and those that nobody filled."""
        counts = Counter(self._past)
        for feed in tuple(self._feeds.values()):
            counts.update(_counts(feed))
        return counts

    def close(self) -> None:
        """End the thread. Twice is fine."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        selector = selectors.EpollSelector()
        resolver = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="kvray-names")
        try:
            while not self._is_over.is_set():
                self._reconcile(selector, resolver)
                ready = {key.data for key, _ in selector.select(_POLL_S)}
                began = time.monotonic()
                for name, feed in tuple(self._feeds.items()):
                    self._serve(name, feed, ready, began)
                self._is_over.wait(_ROUND_S + (time.monotonic() - began) * (1 / _SHARE - 1))
        finally:
            for feed in self._feeds.values():
                feed.close()
            resolver.shutdown(wait=False, cancel_futures=True)
            selector.close()

    def _serve(self, name: str, feed: "_Feed", ready: set["_Line"], now: float) -> None:
        try:
            feed.serve(ready, now)
        except Exception:  # noqa: BLE001 - a defect at one publisher must not end what is known of the others
            _log.exception("The KV events of %s are followed no longer.", name)
            self._leave(name)
            self._give_up(name)

    def _reconcile(self, selector: selectors.BaseSelector, resolver: ThreadPoolExecutor) -> None:
        sources = self._sources
        for name, feed in tuple(self._feeds.items()):
            if sources.get(name) != feed.source:
                self._leave(name)
        for name in sources.keys() - self._feeds.keys():
            try:
                self._feeds[name] = _Feed(selector, resolver, sources[name], self._blocks_max)
            except ConfigError as error:
                _log.warning("The KV events of %s cannot be followed: %s", name, error)
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Let a publisher be, until it tells of other addresses."""
        self._sources = {one: at for one, at in self._sources.items() if one != name}

    def _leave(self, name: str) -> None:
        feed = self._feeds.pop(name)
        feed.close()
        self._past.update(_counts(feed))


class _Feed:
    """One publisher; the thread's alone, but for what the reception counts."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        resolver: ThreadPoolExecutor,
        source: Source,
        blocks_max: int,
    ) -> None:
        self.source = source
        self.reception = Reception(
            PoolContent(blocks_max=blocks_max),
            can_replay=source.replay_endpoint is not None,
            pending_max=_PENDING_MAX,
            pending_bytes=_PENDING_BYTES,
        )
        subscription = b"\x01" + source.topic.encode()
        self._live = _Line(selector, resolver, source.endpoint, "SUB", subscription)
        self._replay = None
        if source.replay_endpoint is not None:
            self._replay = _Line(selector, resolver, source.replay_endpoint, "DEALER")
        self._ask_at = self._replay_until = 0.0
        self._retry_s = _RETRY_S
        self._check_at = 0.0

    def close(self) -> None:
        """Close the connections."""
        for line in (self._live, self._replay):
            if line is not None:
                line.close()

    def serve(self, ready: set["_Line"], now: float) -> None:
        """Take what came, and ask for what is missing."""
        was_up = self._live.is_up
        for frames in self._live.serve(self._live in ready, now):
            if (numbered := _numbered(frames)) is not None:
                self.reception.live(*numbered)
        if was_up and not self._live.is_up:
            self.reception.interrupted()
        if self._replay is None:
            return
        for frames in self._replay.serve(self._replay in ready, now):
            self._take_replay(frames, now)
        if self._replay_until and (now > self._replay_until or not self._replay.is_up):
            # What a late answer brings would be taken for the next one's.
            self._replay.hang_up(now)
            self._replay_until, self._ask_at = 0.0, now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            self.reception.replay_failed()
        if now > self._check_at:
            self._check_at = now + _CHECK_S
            self.reception.check()
        start = self.reception.replay_from
        if start is not None and now >= self._ask_at and self._replay.is_up:
            self._replay.send([b"", pack_sequence(start)])
            self._replay_until = now + _REPLAY_S
            self.reception.replay_begun()

    def _take_replay(self, frames: list[bytes], now: float) -> None:
        numbered = _numbered(frames)
        if numbered is None or not self._replay_until:
            return
        self._replay_until = now + _REPLAY_S
        number, payload = numbered
        if number == END or not payload:
            self._replay_until, self._retry_s = 0.0, _RETRY_S
            self.reception.replay_over()
        else:
            self.reception.replayed(number, payload)


class _Line:
    """A connection to a publisher, made again whenever it is lost."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        resolver: ThreadPoolExecutor,
        address: str,
        kind: str,
        greeting: bytes | None = None,
    ) -> None:
        """Connect to `address`, and send `greeting` each time; ConfigError: it is no address."""
        self._address = address
        self._host, self._port = parse_endpoint(address)
        self._selector, self._resolver = selector, resolver
        self._kind, self._greeting = kind, greeting
        self._lookup: Future[list[Any]] | None = None
        self._attempts = self._failures = 0
        self._retry_at, self._retry_s = 0.0, _RECONNECT_S
        self._until = 0.0
        self._wire: Wire | None = None
        self._events = 0
        self.is_up = False
        """Whether the publisher has answered."""

    def serve(self, is_ready: bool, now: float) -> list[list[bytes]]:
        """Go on with the connection, and return the messages that came."""
        if self._wire is None:
            self._connect(now)
            return []
        try:
            messages = self._receive(self._wire) if is_ready else []
            if not self.is_up and now > self._until:
                raise TransferError("The publisher does not answer.")
        except TransferError as error:
            self._fail(now, error)
            return []
        return messages

    def send(self, frames: list[bytes]) -> None:
        """Send a message; if it cannot be sent, the next `serve` finds the connection lost."""
        assert self._wire is not None
        try:
            self._wire.send(frames)
            self._watch(self._wire)
        except TransferError as error:
            self._fail(time.monotonic(), error)

    def hang_up(self, now: float) -> None:
        """Begin again, after a while."""
        self.close()
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RECONNECT_MAX_S)

    def close(self) -> None:
        """Close the connection."""
        if self._wire is not None:
            self._selector.unregister(self._wire)
            self._wire.close()
        self._wire, self._events, self.is_up = None, 0, False

    def _fail(self, now: float, error: Exception) -> None:
        self._failures += 1
        if self._failures == _FAILURES_SAID:
            _log.warning("Nothing is heard from the KV events at %s: %s", self._address, error)
        self.hang_up(now)

    def _receive(self, wire: Wire) -> list[list[bytes]]:
        wire.flush()
        _, messages = wire.receive(_READ_BYTES)
        if wire.is_ready and not self.is_up:
            self.is_up, self._retry_s, self._failures = True, _RECONNECT_S, 0
            if self._greeting is not None:
                wire.send([self._greeting])
        wire.flush()
        self._watch(wire)
        return messages

    def _connect(self, now: float) -> None:
        """Begin to connect, when it is time. Names are looked up elsewhere: that may take long."""
        if now < self._retry_at:
            return
        if self._lookup is None:
            self._lookup = self._resolver.submit(
                socket.getaddrinfo, self._host, self._port, type=socket.SOCK_STREAM
            )
        if not self._lookup.done():
            return
        lookup, self._lookup = self._lookup, None
        try:
            found = lookup.result()
            family, kind, protocol, _, place = found[self._attempts % len(found)]
            self._attempts += 1
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            self._fail(now, error)
            return
        prepare(connection)
        self._wire = Wire(connection, self._kind, message_max=_MESSAGE_MAX)
        self._until = now + _CONNECT_S
        connection.connect_ex(place)
        self._watch(self._wire)

    def _watch(self, wire: Wire) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.is_sending else 0)
        if not self._events:
            self._selector.register(wire, events, self)
        elif events != self._events:
            self._selector.modify(wire, events, self)
        self._events = events


def _counts(feed: _Feed) -> Counter[str]:
    one = feed.reception
    return Counter(applied=one.num_applied, gap=one.num_gaps, lost=one.num_lost)


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return number and batch of a message; what is before them differs by publisher."""
    try:
        return unpack_sequence(frames[-2]), frames[-1]
    except (IndexError, TransferError):
        return None
