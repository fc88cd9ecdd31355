"""Follows publishers of KV events over ZMQ, on one thread, and keeps what each of them has.

A connection that is lost, or was silent for long, is followed by a question for the last batch. So
what was lost without a later batch is found, too, and a publisher that has restarted.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from kvray.errors import TransferError
from kvray.events.message import END, pack_sequence, unpack_sequence
from kvray.events.pool_content import PoolContent
from kvray.events.reception import Reception

_log = logging.getLogger(__name__)

_LIVE_MAX, _REPLAY_MAX = 10_000, 20_000  # batches that wait for this thread, of one publisher
_PENDING_MAX = 10_000
_STEP = 256  # batches that one publisher has taken before others have their turn
_POLL_MS = 100
_CHECK_S = 10.0
_REPLAY_S = 5.0  # how long a replay may bring nothing
_RETRY_S, _RETRY_MAX_S = 1.0, 30.0
_HEARTBEAT_MS, _SILENT_MS = 2_000, 6_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5_000


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
        context = zmq.Context()
        try:
            while not self._is_over.is_set():
                self._reconcile(context)
                poller = zmq.Poller()
                for feed in self._feeds.values():
                    for socket in feed.sockets():
                        poller.register(socket, zmq.POLLIN)
                poller.poll(_POLL_MS)
                now = time.monotonic()
                for feed in self._feeds.values():
                    feed.serve(now)
        finally:
            for feed in self._feeds.values():
                feed.close()
            context.term()

    def _reconcile(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        sources = self._sources
        for name, feed in tuple(self._feeds.items()):
            if sources.get(name) != feed.source:
                feed.close()
                self._past.update(_counts(feed))
                del self._feeds[name]
        for name in sources.keys() - self._feeds.keys():
            try:
                self._feeds[name] = _Feed(context, sources[name], self._blocks_max)
            except zmq.ZMQError as error:
                _log.warning("The KV events of %s cannot be followed: %s", name, error)
                self._sources = {one: at for one, at in sources.items() if one != name}
                return


class _Feed:
    """One publisher's sockets; the thread's alone, but for what the reception counts."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", source: Source, blocks_max: int
    ) -> None:
        self.source = source
        self.reception = Reception(
            PoolContent(blocks_max=blocks_max),
            can_replay=source.replay_endpoint is not None,
            pending_max=_PENDING_MAX,
        )
        self._context = context
        self._live = _socket(context, zmq.SUB, _LIVE_MAX)
        self._live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self._breaks = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._replay: zmq.Socket[bytes] | None = None
        self._ask_at = self._replay_until = 0.0
        self._retry_s = _RETRY_S
        self._check_at = 0.0
        try:
            self._live.connect(source.endpoint)
            if source.replay_endpoint is not None:
                self._replay = self._open_replay(source.replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Return the sockets to poll."""
        opened = [self._live, self._breaks]
        return opened if self._replay is None else [*opened, self._replay]

    def close(self) -> None:
        """Close the sockets."""
        self._live.disable_monitor()
        for socket in self.sockets():
            socket.close(linger=0)

    def serve(self, now: float) -> None:
        """Take what came, and ask for what is missing."""
        self._hear_breaks()
        self._hear_live()
        if self._replay is None or self.source.replay_endpoint is None:
            return
        self._hear_replay(self._replay, now)
        if self._replay_until and now > self._replay_until:
            # What a late answer brings would be taken for the next one's.
            self._replay.close(linger=0)
            self._replay = self._open_replay(self.source.replay_endpoint)
            self._replay_until, self._ask_at = 0.0, now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            self.reception.replay_failed()
        if now > self._check_at:
            self._check_at = now + _CHECK_S
            self.reception.check()
        start = self.reception.replay_from
        if start is not None and now >= self._ask_at:
            self._ask(self._replay, start, now)

    def _hear_breaks(self) -> None:
        while self._breaks.poll(0):
            self._breaks.recv_multipart()
            self.reception.interrupted()

    def _hear_live(self) -> None:
        for _ in range(_STEP):
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear_breaks()  # before what the next publisher at this address sends
            numbered = _numbered(frames)
            if numbered is not None:
                self.reception.live(*numbered)

    def _hear_replay(self, replay: "zmq.Socket[bytes]", now: float) -> None:
        for _ in range(_STEP):
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            numbered = _numbered(frames)
            if numbered is None or not self._replay_until:
                continue
            self._replay_until = now + _REPLAY_S
            number, payload = numbered
            if number == END or not payload:
                self._replay_until, self._retry_s = 0.0, _RETRY_S
                self.reception.replay_over()
            else:
                self.reception.replayed(number, payload)

    def _ask(self, replay: "zmq.Socket[bytes]", start: int, now: float) -> None:
        try:
            replay.send_multipart([b"", pack_sequence(start)], zmq.NOBLOCK)
        except zmq.Again:  # it is not there
            self._ask_at = now + self._retry_s
            return
        self._replay_until = now + _REPLAY_S
        self.reception.replay_begun()

    def _open_replay(self, endpoint: str) -> "zmq.Socket[bytes]":
        replay = _socket(self._context, zmq.DEALER, _REPLAY_MAX)
        replay.connect(endpoint)
        return replay


def _counts(feed: _Feed) -> Counter[str]:
    one = feed.reception
    return Counter(applied=one.num_applied, gap=one.num_gaps, lost=one.num_lost)


def _socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, num_max: int
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(num_max)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return number and batch of a message; what is before them differs by publisher."""
    try:
        return unpack_sequence(frames[-2]), frames[-1]
    except (IndexError, TransferError):
        return None
