"""Publishes KV events: on one port what happens, on another replays of what has happened.

A replay of batches that are no longer kept is a snapshot: everything is cleared, then stored again.
So a subscriber that comes late, or that the network left behind, always gets the whole content:

- After a new subscription an empty batch is sent. Its number is far above those that the subscriber
  knows, so a subscriber that looks for gaps asks for a replay.
- Not all subscribers do, and Dynamo before 1.6 asks but does not understand the answer. So the
  content then goes out to all as ordinary events; who has it already has the same afterwards.
- A subscriber of an earlier run has that one's content. So for some seconds after the start a
  subscription has everything cleared first.

A client costs a place in the log or in a snapshot, one batch that is on its way, and one request:
whatever it sends or does not read, no more of it is kept, and what it may say in a second is
bounded. Who finds all places taken gets that of the client that deserves one least.

Source: the frames are those of vLLM's and TensorRT-LLM's publishers; a subscriber sends
`[empty, number]` and gets `[empty, number, batch]` until number -1 with an empty batch.
"""

import contextlib
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from kvray.errors import ConfigError, TransferError
from kvray.events.message import (
    END,
    AllBlocksCleared,
    Batch,
    Event,
    pack,
    pack_sequence,
    unpack_sequence,
)
from kvray.events.native import EventLog
from kvray.events.zmtp import Wire, endpoint, parse_endpoint, prepare

BATCH_BLOCKS = 128
"""Blocks in a batch, more only where a replay has too few numbers for its batches."""
_STEPS = (BATCH_BLOCKS, 2 * BATCH_BLOCKS, 4 * BATCH_BLOCKS, 8 * BATCH_BLOCKS)
_PAGES_MAX = 256
_TOPIC = b""
_BATCHES_MAX, _BYTES_MAX = 10_000, 32 * 2**20
_CLIENTS_MAX = 256  # of each of the two ports
_REQUEST_MAX = 1024  # bytes of a message from a client
_READ_BYTES, _READ_BYTES_PER_S, _READ_AHEAD_S = 512, 1024, 4.0
"""What is read of a client at a time, and in the long run; it may save some seconds up."""
_WAITING_MAX = 1024  # connections that wait to be accepted
_ACCEPTS, _ACCEPT_S = 128, 0.02  # so many connections in so many seconds, of each port
_FIRST_S = 10.0  # how long a client may take to say what it is
_REPLAY_S = 60.0  # how long a replay may get no batch rid
_STEP = 16  # batches of replays, or of one client's backlog, before others have their turn
_GREET_S = 0.1  # between two batches for new subscriptions
_SNAPSHOT_S = 30.0  # between two snapshots for all
_START_S = 10.0  # how long subscribers of an earlier run take to come back
_LOOK_S = 1.0  # how often it is looked for clients that do nothing


class Content(Protocol):
    """What the publisher has."""

    def num_blocks(self) -> int:
        """Return about how many blocks there are, counted once a medium; at once."""

    def page(self, after: int, step: int) -> tuple[Sequence[Event], int | None]:
        """Return events that store the next `step` blocks or so, and where they go on.

        `after` is 0 for the first ones. None: there are no more. What changes meanwhile may be in
        them or not.
        """


@dataclass(slots=True, eq=False)
class _Client:
    wire: Wire
    host: str
    is_live: bool
    """Whether it came to the port for what happens."""
    moved_at: float
    """When it came, or last took something."""
    read_until: float = 0.0
    """What it has sent so far is worth the time until then."""
    next: int | None = None
    """The number of the batch that it gets next; None: it has not subscribed."""
    route: list[bytes] = field(default_factory=list)
    """The empty frame, if its question had one."""
    replay: Iterator[tuple[int, bytes]] | None = None
    """What is left of the answer to it."""
    turn: int = 0
    """Its place among the replays, lowest first."""
    waits_for: int = 0
    """The events of its socket that are waited for."""


_Page = tuple[bytes, int | None, int]
"""A part of a snapshot, for all replays that come by soon: its batch, where the snapshot goes on,
and the latest batch when it was made. Later ones are not in it."""


class ZmqPublisher:
    """Publishes one content on any number of addresses; used by one thread."""

    def __init__(self, content: Content, *, first: int) -> None:
        """Number batches from `first` on."""
        self._content = content
        self._first = first
        self._log = EventLog(first, batches_max=_BATCHES_MAX, bytes_max=_BYTES_MAX)
        self._selector = selectors.EpollSelector()
        self._listeners: dict[str, socket.socket] = {}
        self._clients: set[_Client] = set()
        self._places = _places()
        self._accept_at = {True: 0.0, False: 0.0}
        """When new clients are heard next, on the port for what happens and on that for replays."""
        self._look_at = 0.0
        self._unread: set[_Client] = set()
        """Those that have said too much for now."""
        self._replays: set[_Client] = set()
        self._turns = count()
        self._pages: dict[tuple[int, int], _Page] = {}
        """By their place and step; the oldest first."""
        self._snapshot: int | None = None
        """Where a snapshot goes on that goes out to all."""
        self._snapshot_at = self._greet_at = 0.0
        self._has_newcomers = self._is_greeting = False
        self._start_until = time.monotonic() + _START_S
        self.num_replays = 0

    @property
    def last(self) -> int:
        """The number of the latest batch."""
        return self._log.last

    @property
    def num_batches(self) -> int:
        """Batches so far."""
        return self._log.last + 1 - self._first

    def fileno(self) -> int:
        """Return a descriptor that can be read when `serve` has something to do."""
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `serve` has more to do than what comes in."""
        waits = any(not one.wire.is_sending for one in self._replays)
        waits = waits or self._snapshot is not None or self._is_greeting
        return waits or any(
            one.next is not None and one.next <= self._log.last and not one.wire.is_sending
            for one in self._clients
        )

    def bind(self, live: str, replay: str) -> tuple[str, str]:
        """Publish on one more pair of addresses, and return them with their ports.

        ConfigError: one of them is none, or cannot be had.
        """
        bound = self._bind(live, is_live=True)
        try:
            return bound, self._bind(replay, is_live=False)
        except ConfigError:
            self.unbind(bound)
            raise

    def unbind(self, *addresses: str) -> None:
        """Give addresses up; who is connected through them stays connected."""
        for address in addresses:
            listener = self._listeners.pop(address, None)
            if listener is not None:
                self._selector.unregister(listener)
                listener.close()

    def close(self) -> None:
        """Close the sockets. Twice is fine."""
        self.unbind(*self._listeners)
        for client in tuple(self._clients):
            self._drop(client)
        self._selector.close()

    def publish(self, events: Sequence[Event]) -> None:
        """Have `serve` send a batch to all subscribers, and keep it for replays."""
        self._log.add(self._packed(events))

    def serve(self, now: float) -> None:
        """Hear clients, and send what they have room for; `now` is monotonic, in seconds."""
        for key, events in self._selector.select(0):
            if isinstance(key.data, _Client):
                if key.data in self._clients:  # it may just have lost its place
                    self._hear(key.data, events, now)
            elif now >= self._accept_at[key.data]:
                self._accept(key.fileobj, now, is_live=key.data)  # type: ignore[arg-type]
        for client in [one for one in self._unread if _may_be_read(one, now)]:
            self._unread.discard(client)
            self._wait_for(client, now)
        self._greet(now)
        self._tell_newcomers(now)
        for client in tuple(self._clients):
            if client.next is not None:
                self._send_live(client, now)
        self._send_replays(now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._drop_idle(now)

    def _accept(self, listener: socket.socket, now: float, *, is_live: bool) -> None:
        self._accept_at[is_live] = now + _ACCEPT_S
        if len(self._clients) >= self._places:
            # Some may have hung up after more than may be read of it by now.
            for client in [one for one in self._clients if one.wire.has_hung_up]:
                self._drop(client)
        for _ in range(_ACCEPTS):
            try:
                connection, address = listener.accept()
            except OSError:  # nobody else waits, or descriptors have run out
                return
            connection.setblocking(False)
            host = str(address[0])
            self._make_room(host, is_live=is_live)
            wire = Wire(connection, "XPUB" if is_live else "ROUTER", message_max=_REQUEST_MAX)
            client = _Client(wire, host, is_live, now)
            self._clients.add(client)
            self._wait_for(client, now)

    def _make_room(self, host: str, *, is_live: bool) -> None:
        """Drop the client that deserves its place least, if all places are taken.

        It is one of the host with the most. A subscriber that keeps up, or a replay that is read,
        is the last to go; and of those the newest, so that nobody comes by pushing.
        """
        own = [one for one in self._clients if one.is_live == is_live]
        if len(own) < self._places:
            return
        crowds = Counter(one.host for one in own)
        crowds[host] += 1
        self._drop(
            max(
                own,
                key=lambda one: (
                    crowds[one.host],
                    not one.wire.is_ready,
                    one.next is None and one.replay is None,
                    one.wire.is_sending,
                    -one.moved_at if one.wire.is_sending or one.next is None else one.moved_at,
                ),
            )
        )

    def _hear(self, client: _Client, events: int, now: float) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.wire.flush()
                client.moved_at = now
            if events & selectors.EVENT_READ:
                size, messages = client.wire.receive(_READ_BYTES)
                client.read_until = max(client.read_until, now) + size / _READ_BYTES_PER_S
                take = self._take_subscription if client.is_live else self._take_question
                for message in messages:
                    take(client, message)
                client.wire.flush()
        except TransferError:
            self._drop(client)
        else:
            self._wait_for(client, now)

    def _take_subscription(self, client: _Client, message: list[bytes]) -> None:
        """Note that a client begins or ends to subscribe to all; other topics never occur."""
        if message == [b"\x01" + _TOPIC] and client.next is None:
            client.next = self._log.last + 1
            self._has_newcomers = self._is_greeting = True
        elif message == [b"\x00" + _TOPIC]:
            client.next = None

    def _take_question(self, client: _Client, message: list[bytes]) -> None:
        """Note what a client asks, in place of what it asked before; the rest gets no answer."""
        *route, number = message
        with contextlib.suppress(TransferError):
            start = unpack_sequence(number)
            if route in ([], [b""]):
                if client.replay is None:
                    client.turn = next(self._turns)
                client.route, client.replay = route, self._since(max(0, start))
                self._replays.add(client)

    def _greet(self, now: float) -> None:
        """Send new subscriptions a batch, one for all that came since the last one."""
        if not self._is_greeting or now < self._greet_at:
            return
        self._is_greeting, self._greet_at = False, now + _GREET_S
        if now < self._start_until:
            self._snapshot, self._snapshot_at = None, 0.0
            self.publish([AllBlocksCleared()])
        else:
            self.publish([])

    def _send_live(self, client: _Client, now: float) -> None:
        """Send a subscriber what there is room for; it loses what is no longer kept."""
        assert client.next is not None
        try:
            for _ in range(_STEP):
                if client.wire.is_sending or client.next > self._log.last:
                    break
                number = max(client.next, self._log.oldest)
                client.next = number + 1
                client.wire.send([_TOPIC, pack_sequence(number), self._log[number]])
                client.moved_at = now
        except TransferError:
            self._drop(client)
        else:
            self._wait_for(client, now)

    def _send_replays(self, now: float) -> None:
        """Go on with the replays whose clients take what they get, a batch each in turn.

        So nobody waits longer than a batch for each of the others takes, however often they ask or
        connect again.
        """
        for _ in range(_STEP):
            able = [one for one in self._replays if not one.wire.is_sending]
            if not able:
                break
            client = min(able, key=lambda one: one.turn)
            assert client.replay is not None
            number, payload = next(client.replay)
            client.turn, client.moved_at = next(self._turns), now
            if number == END:
                client.replay = None
                self._replays.discard(client)
                self.num_replays += 1
            try:
                client.wire.send([*client.route, pack_sequence(number), payload])
            except TransferError:
                self._drop(client)
            else:
                self._wait_for(client, now)

    def _since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and batch of what has happened from `start` on, and then the end."""
        while start <= self._log.last:
            if start >= self._log.oldest:
                yield start, self._log[start]
            else:
                last = self._log.last
                yield from self._numbered_snapshot(start, last)
                start = last
            start += 1
        yield END, b""

    def _numbered_snapshot(self, start: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield the content as batches that are numbered from `start` on, the final one `last`.

        Events after `last` follow it, so what changes meanwhile comes out right. A subscriber may
        take a number near `last` for the end of what it missed, so only the final batch has one.
        Where there are too few numbers even for large batches, they begin below `start`.
        """
        num_blocks = self._content.num_blocks()
        step = next((one for one in _STEPS if num_blocks // one <= last - start), _STEPS[-1])
        start = max(0, min(start, last - num_blocks // step))
        payload, place = self._page(0, step, last)
        while place is not None:
            yield start, payload
            start = min(start + 1, last - 1)
            payload, place = self._page(place, step, last)
        yield last, payload

    def _page(self, place: int, step: int, last: int) -> tuple[bytes, int | None]:
        """Return a part of a snapshot that has all up to batch `last`, and where it goes on."""
        page = self._pages.get((place, step))
        if page is None or page[2] < last:
            self._pages.pop((place, step), None)
            events, after = self._content.page(place, step)
            cleared = () if place else (AllBlocksCleared(),)
            page = self._packed([*cleared, *events]), after, self._log.last
            self._pages[place, step] = page
            if len(self._pages) > _PAGES_MAX:
                del self._pages[next(iter(self._pages))]
        return page[:2]

    def _tell_newcomers(self, now: float) -> None:
        """Send everything to all if somebody has come since that was last done."""
        if self._snapshot is None:
            if not self._has_newcomers or self._is_greeting or now < self._snapshot_at:
                return
            self._has_newcomers, self._snapshot_at = False, now + _SNAPSHOT_S
            self._snapshot = 0
        for _ in range(_STEP):
            stored, self._snapshot = self._content.page(self._snapshot, BATCH_BLOCKS)
            self.publish(stored)
            if self._snapshot is None:
                return

    def _drop_idle(self, now: float) -> None:
        """Drop who does not say what it is, or takes nothing of a replay."""
        for client in tuple(self._clients):
            is_late = not client.wire.is_ready and now > client.moved_at + _FIRST_S
            if is_late or (client.replay is not None and now > client.moved_at + _REPLAY_S):
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._unread.discard(client)
        self._replays.discard(client)
        if client.waits_for:
            self._selector.unregister(client.wire)
        client.next = client.replay = None
        client.waits_for = 0
        client.wire.close()

    def _wait_for(self, client: _Client, now: float) -> None:
        """Wait for room where something is to be sent, else for what the client says.

        Nothing is read of a client that does not take its answers, or that says too much.
        """
        waits_for = 0
        if client.wire.is_sending:
            waits_for = selectors.EVENT_WRITE
        elif client.replay is None:
            if _may_be_read(client, now):
                waits_for = selectors.EVENT_READ
            else:
                self._unread.add(client)
        if waits_for == client.waits_for:
            return
        if not waits_for:
            self._selector.unregister(client.wire)
        elif client.waits_for:
            self._selector.modify(client.wire, waits_for, client)
        else:
            self._selector.register(client.wire, waits_for, client)
        client.waits_for = waits_for

    @staticmethod
    def _packed(events: Sequence[Event]) -> bytes:
        return pack(Batch(at=time.time(), events=events, dp_rank=0))

    def _bind(self, address: str, *, is_live: bool) -> str:
        host, port = parse_endpoint(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            # All addresses of a node are those of both kinds.
            is_dual = host == "::" and socket.has_dualstack_ipv6()
            listener = socket.create_server(
                (host, port), family=family, backlog=_WAITING_MAX, dualstack_ipv6=is_dual
            )
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"KV events cannot be published on {address} ({getattr(error, 'strerror', error)})."
            ) from None
        prepare(listener)
        bound = endpoint(host, listener.getsockname()[1])
        self._listeners[bound] = listener
        self._selector.register(listener, selectors.EVENT_READ, is_live)
        return bound


def _places() -> int:
    """Return how many clients a port may have: of few descriptors the others need most."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unbounded = files_max == resource.RLIM_INFINITY
    return _CLIENTS_MAX if is_unbounded else max(2, min(_CLIENTS_MAX, files_max // 32))


def _may_be_read(client: _Client, now: float) -> bool:
    return client.read_until < now + _READ_AHEAD_S
