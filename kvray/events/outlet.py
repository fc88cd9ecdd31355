"""Publishes KV events over ZMQ: an XPUB socket for what happens, a ROUTER socket for replays.

A replay of batches that are no longer kept is a snapshot: everything is cleared, then stored again.
So a subscriber that comes late, or that the network left behind, always gets the whole content:

- Each new subscription has an empty batch sent. Its number is far above those that the subscriber
  knows, so a subscriber that looks for gaps asks for a replay.
- Not all subscribers do, and Dynamo before 1.6 asks but does not understand the answer. So the
  content then goes out to all as ordinary events; who has it already has the same afterwards.
- A subscriber of an earlier run has that one's content. So for some seconds after the start a
  subscription has everything cleared first.

Source: the frames are those of vLLM's and TensorRT-LLM's publishers; a subscriber sends
`[empty, number]` and gets `[empty, number, batch]` until number -1 with an empty batch.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from kvray.errors import ConfigError, TransferError
from kvray.events.log import EventLog
from kvray.events.message import (
    END,
    AllBlocksCleared,
    Batch,
    Event,
    pack,
    pack_sequence,
    unpack_sequence,
)

BATCH_BLOCKS = 128
"""Blocks in a batch, more only where a replay has too few numbers for its batches."""
_TOPIC = b""
_LIVE_MAX = 1000  # batches that wait for one subscriber; beyond them it loses some
_BATCHES_MAX, _BYTES_MAX = 10_000, 64 * 2**20
_REPLAY_WAITING_MAX = 16  # batches that wait for one client of a replay
_REPLAYS_MAX = 64
_REPLAY_S = 60.0  # how long a replay may get no batch rid
_STEP = 16  # batches of a replay or snapshot that are sent before others have their turn
_SNAPSHOT_S = 30.0  # between two snapshots for all
_START_S = 10.0  # how long subscribers of an earlier run take to come back


class Content(Protocol):
    """What the publisher has."""

    def num_blocks(self) -> int:
        """Return about how many blocks there are, counted once a medium."""

    def stored(self, step: int) -> Iterator[Sequence[Event]]:
        """Yield events that store everything, about `step` blocks at a time.

        What changes meanwhile may be in it or not.
        """


@dataclass(slots=True)
class _Replay:
    route: list[bytes]
    """The client, and the empty frame if it sent one."""
    batches: Iterator[tuple[int, bytes]]
    next: tuple[int, bytes] | None
    until: float


class Outlet:
    """Publishes one content on any number of addresses; used by one thread."""

    def __init__(self, content: Content, *, first: int) -> None:
        """Number batches from `first` on."""
        self._content = content
        self._first = first
        self._log = EventLog(first, batches_max=_BATCHES_MAX, bytes_max=_BYTES_MAX)
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.XPUB)
        self._live.set_hwm(_LIVE_MAX)
        # Each subscription is told, not only the first of its kind.
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(_REPLAY_WAITING_MAX)
        # It raises in place of dropping what a slow client has no room for.
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._replays: list[_Replay] = []
        self._snapshot: Iterator[Sequence[Event]] | None = None
        """The rest of a snapshot that goes out to all."""
        self._snapshot_at = 0.0
        self._has_newcomers = False
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

    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """Return the sockets to poll for input."""
        return [self._live, self._replay]

    @property
    def is_busy(self) -> bool:
        """Whether `serve` has more to do than what comes in."""
        return bool(self._replays) or self._snapshot is not None

    def bind(self, live: str, replay: str) -> None:
        """Publish on one more pair of addresses; ConfigError: one of them cannot be had."""
        self._bind(self._live, live)
        try:
            self._bind(self._replay, replay)
        except ConfigError:
            self._live.unbind(live)
            raise

    def unbind(self, live: str, replay: str) -> None:
        """Give a pair of addresses up; who is connected through them stays connected."""
        for socket, address in ((self._live, live), (self._replay, replay)):
            with contextlib.suppress(zmq.ZMQError):
                socket.unbind(address)

    def close(self) -> None:
        """Close the sockets. Twice is fine."""
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch to all subscribers that keep up, and keep it for replays."""
        payload = self._packed(events)
        number = self._log.add(payload)
        self._live.send_multipart([_TOPIC, pack_sequence(number), payload], zmq.NOBLOCK)

    def serve(self, now: float) -> None:
        """Hear subscribers, and go on with replays; `now` is monotonic, in seconds."""
        self._hear_subscriptions(now)
        self._hear_requests(now)
        self._replays = [one for one in self._replays if self._advance(one, now)]
        self._tell_newcomers(now)

    def _hear_subscriptions(self, now: float) -> None:
        while self._live.poll(0):
            if self._live.recv()[:1] != b"\x01":
                continue
            self._has_newcomers = True
            if now < self._start_until:
                self._snapshot, self._snapshot_at = None, 0.0
                self.publish([AllBlocksCleared()])
            else:
                self.publish([])

    def _hear_requests(self, now: float) -> None:
        while self._replay.poll(0):
            *route, number = self._replay.recv_multipart()
            with contextlib.suppress(TransferError):  # whoever sends something else gets nothing
                start = max(0, unpack_sequence(number))
                if len(route) in (1, 2):
                    self._begin(route, self._since(start), now)

    def _begin(self, route: list[bytes], batches: Iterator[tuple[int, bytes]], now: float) -> None:
        """Begin a replay, in place of the client's last one; of too many the slowest ends."""
        self._replays = [one for one in self._replays if one.route[0] != route[0]]
        if len(self._replays) >= _REPLAYS_MAX:
            self._replays.remove(min(self._replays, key=lambda one: one.until))
        self._replays.append(_Replay(route, batches, next(batches), now + _REPLAY_S))

    def _advance(self, replay: _Replay, now: float) -> bool:
        """Send of a replay what there is room for; False: it is over."""
        for _ in range(_STEP):
            if replay.next is None:
                self.num_replays += 1
                return False
            number, payload = replay.next
            try:
                self._replay.send_multipart(
                    [*replay.route, pack_sequence(number), payload], zmq.NOBLOCK
                )
            except zmq.Again:
                return now < replay.until
            except zmq.ZMQError:
                return False  # its client has gone
            replay.until = now + _REPLAY_S
            replay.next = next(replay.batches, None)
        return True

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
        """
        step = max(BATCH_BLOCKS, -(-self._content.num_blocks() // max(1, last - start)))
        events: list[Event] = [AllBlocksCleared()]
        for stored in self._content.stored(step):
            if start < last:
                yield start, self._packed(events)
                start, events = start + 1, []
            events += stored
        yield last, self._packed(events)

    def _tell_newcomers(self, now: float) -> None:
        """Send everything to all if somebody has come since that was last done."""
        if self._snapshot is None:
            if not self._has_newcomers or now < self._snapshot_at:
                return
            self._has_newcomers, self._snapshot_at = False, now + _SNAPSHOT_S
            self._snapshot = self._content.stored(BATCH_BLOCKS)
        for _ in range(_STEP):
            stored = next(self._snapshot, None)
            if stored is None:
                self._snapshot = None
                return
            self.publish(stored)

    @staticmethod
    def _packed(events: Sequence[Event]) -> bytes:
        return pack(Batch(at=time.time(), events=events, dp_rank=0))

    @staticmethod
    def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"KV events cannot be published on {address} ({error}).") from None
