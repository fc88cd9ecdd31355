"""Follows publishers of KV events, on one thread, and keeps what each of them has.

A connection that is lost is made again, and followed by a question for the last batch; so is a long
silence. So what was lost without a later batch is found, too, and a publisher that has restarted.

Of a publisher there is one message in memory that is not whole, the batches that wait for a replay,
and its blocks, each of bounded size. What it sends beyond that waits on its own side.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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
        resolver = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="kvray-names")
        try:
            asyncio.run(self._follow_all(_Lines(resolver)))
        finally:
            resolver.shutdown(wait=False, cancel_futures=True)

    async def _follow_all(self, lines: "_Lines") -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        given_up: dict[str, Source] = {}  # until they tell of other addresses
        while not self._is_over.is_set():
            told = self._sources
            given_up = {name: one for name, one in given_up.items() if told.get(name) == one}
            sources = {name: one for name, one in told.items() if name not in given_up}
            for name, feed in tuple(self._feeds.items()):
                if sources.get(name) != feed.source:
                    self._leave(name, tasks.pop(name))
            for name in sources.keys() - self._feeds.keys():
                try:
                    self._feeds[name] = feed = _Feed(lines, sources[name], self._blocks_max)
                    tasks[name] = asyncio.create_task(feed.run())
                except ConfigError as error:
                    _log.warning("The KV events of %s cannot be followed: %s", name, error)
                    given_up[name] = sources[name]
            for name, task in tuple(tasks.items()):
                if task.done():  # a defect, which must not end what is known of the others
                    defect = task.exception()
                    _log.error("The KV events of %s are followed no longer.", name, exc_info=defect)
                    self._leave(name, tasks.pop(name))
                    given_up[name] = sources[name]
            await asyncio.sleep(_POLL_S)

    def _leave(self, name: str, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._past.update(_counts(self._feeds.pop(name)))


class _Feed:
    """One publisher; the thread's alone, but for what the reception counts."""

    def __init__(self, lines: "_Lines", source: Source, blocks_max: int) -> None:
        """ConfigError: one of its addresses is none."""
        for address in filter(None, (source.endpoint, source.replay_endpoint)):
            parse_endpoint(address)
        self.source = source
        self.reception = Reception(
            PoolContent(blocks_max=blocks_max),
            can_replay=source.replay_endpoint is not None,
            pending_max=_PENDING_MAX,
            pending_bytes=_PENDING_BYTES,
        )
        self._lines = lines
        self._ask_at, self._retry_s = 0.0, _RETRY_S
        self._check_at = 0.0
        self._until = 0.0
        """When a replay that is under way counts as broken off; 0: there is none."""

    async def run(self) -> None:
        """Follow it, and ask for what is missing; both without end."""
        ways = [self._lines.stay(self.source.endpoint, "SUB", self._hear)]
        if self.source.replay_endpoint is not None:
            address, failed = self.source.replay_endpoint, self.reception.replay_failed
            ways.append(self._lines.stay(address, "DEALER", self._ask, failed))
        tasks = [asyncio.ensure_future(one) for one in ways]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _hear(self, wire: Wire) -> None:
        try:
            wire.send([b"\x01" + self.source.topic.encode()])
            while True:
                await self._lines.receive(wire, self._take, None)
        finally:
            self.reception.interrupted()

    def _take(self, frames: list[bytes]) -> None:
        if (numbered := _numbered(frames)) is not None:
            self.reception.live(*numbered)

    async def _ask(self, wire: Wire) -> None:
        while True:
            now = time.monotonic()
            if now > self._check_at:
                self._check_at = now + _CHECK_S
                self.reception.check()
            start = self.reception.replay_from
            if start is None or now < self._ask_at:
                await self._lines.receive(wire, self._take_replay, _POLL_S)
                continue
            try:
                self.reception.replay_begun()
                self._until = now + _REPLAY_S
                wire.send([b"", pack_sequence(start)])
                while self._until:
                    left_s = self._until - time.monotonic()
                    await self._lines.receive(wire, self._take_replay, left_s)
                    if 0 < self._until < time.monotonic():
                        raise TransferError("A replay has stopped.")
            except TransferError:
                # What a late answer brings would be taken for the next one's: hang up.
                self._until, self._ask_at = 0.0, time.monotonic() + self._retry_s
                self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
                raise

    def _take_replay(self, frames: list[bytes]) -> None:
        numbered = _numbered(frames)
        if numbered is None or not self._until:
            return
        self._until = time.monotonic() + _REPLAY_S
        number, payload = numbered
        if number == END or not payload:
            self._until, self._retry_s = 0.0, _RETRY_S
            self.reception.replay_over()
        else:
            self.reception.replayed(number, payload)


class _Lines:
    """Connections to publishers; they share who looks names up, and a part of a core."""

    def __init__(self, resolver: ThreadPoolExecutor) -> None:
        self._resolver = resolver
        self._turn = asyncio.Lock()
        self._owed_s = 0.0

    async def stay(
        self,
        address: str,
        kind: str,
        speak: Callable[[Wire], Awaitable[None]],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to `address`, again whenever that `failed` or is lost, and `speak` over it."""
        host, port = parse_endpoint(address)
        loop = asyncio.get_running_loop()
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        attempts, failures, retry_s = 0, 0, _RECONNECT_S
        while True:
            try:
                found = await loop.run_in_executor(self._resolver, look_up)  # that may take long
                family, type_, protocol, _, place = found[attempts % len(found)]
                attempts += 1
                with contextlib.closing(socket.socket(family, type_, protocol)) as connection:
                    prepare(connection)
                    wire = Wire(connection, kind, message_max=_MESSAGE_MAX)
                    await _open(connection, place, wire)
                    failures, retry_s = 0, _RECONNECT_S
                    await speak(wire)
            except (OSError, TransferError) as error:
                failures += 1
                failed()
                if failures == _FAILURES_SAID:
                    _log.warning("Nothing is heard from the KV events at %s: %s", address, error)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RECONNECT_MAX_S)

    async def receive(
        self, wire: Wire, take: Callable[[list[bytes]], None], timeout_s: float | None
    ) -> None:
        """Hand over the messages that come next, if any do in time, one connection at a time."""
        if not await _is_ready(wire, timeout_s):
            return
        async with self._turn:
            began = time.monotonic()
            wire.flush()
            for frames in wire.receive(_READ_BYTES)[1]:
                take(frames)
            wire.flush()
            self._owed_s += (time.monotonic() - began) * (1 / _SHARE - 1)
            if self._owed_s > _ROUND_S:
                owed_s, self._owed_s = self._owed_s, 0.0
                await asyncio.sleep(owed_s)


async def _open(connection: socket.socket, place: tuple[object, ...], wire: Wire) -> None:
    """Connect, and return once the peer has said what it is; it has `_CONNECT_S` for that."""
    until = time.monotonic() + _CONNECT_S
    with contextlib.suppress(BlockingIOError):
        connection.connect(place)
    while not wire.is_ready:
        if not await _is_ready(wire, until - time.monotonic()):
            raise TransferError("The publisher does not answer.")
        wire.flush()
        wire.receive(_READ_BYTES)


async def _is_ready(wire: Wire, timeout_s: float | None) -> bool:
    """Wait for something to read, or for room to write what waits; return whether it came.

    Without `wait_for`, which before Python 3.12 loses a cancellation if the result has just come:
    what is followed without end would never end.
    """
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake(has_come: bool) -> None:
        if not ready.done():
            ready.set_result(has_come)

    loop.add_reader(wire, wake, True)
    if wire.is_sending:
        loop.add_writer(wire, wake, True)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake, False)
    try:
        return bool(await ready)
    finally:
        loop.remove_reader(wire)
        loop.remove_writer(wire)
        if timer is not None:
            timer.cancel()


def _counts(feed: _Feed) -> Counter[str]:
    one = feed.reception
    return Counter(applied=one.num_applied, gap=one.num_gaps, lost=one.num_lost)


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return number and batch of a message; what is before them differs by publisher."""
    try:
        return unpack_sequence(frames[-2]), frames[-1]
    except (IndexError, TransferError):
        return None
