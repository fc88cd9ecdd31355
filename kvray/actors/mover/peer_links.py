"""Links to the movers of other nodes, each opened by a handshake before the first fetch.

The first piece from a node takes much longer than the next: Ray looks the actor up and transports
connect. A handshake pays for that beforehand. It is a read lease of no blocks and a piece without
any, taken when a node appears and again from time to time.

A transport that both ends have may still fail between them, where a firewall lets only Ray's ports
through. After several failures in a row it is left out of what a source may choose from, so that
the next transport is used. Handshakes try it again; requests do so only after one has arrived, and
less and less often if they fail all the same.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvray.actors.mover.fenced_slots import FencedSlots
from kvray.actors.mover.orders import LeaseRequest, ReadLease, SendOrder
from kvray.errors import KVRayError, TransferError, TransportUnavailable

_log = logging.getLogger("kvray.mover")

FAILURES_MAX = 2  # failures in a row after which a transport is left out
_AGAIN_S = 60.0
"""An idle link gets another handshake after this long: connections do not last for ever."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 120.0
_PEERS_MAX = 128
"""Nodes that get handshakes; fetches from others work too, with a slower first piece."""
_LEASE_S = 1.0
_SWEEP_S = 0.25
_JOIN_TIMEOUT_S = 5.0


class RemoteMovers(Protocol):
    """The movers of other nodes, by name.

    Calls end within `timeout_s`, at worst with a KVRayError: ShardUnavailable if there is no such
    mover, or it does not answer.
    """

    def lease(self, mover: str, request: LeaseRequest, *, timeout_s: float) -> ReadLease:
        """As `Mover.lease`."""
        ...

    def send(self, mover: str, order: SendOrder, *, timeout_s: float) -> Any:
        """As `Mover.send`."""
        ...

    def release(
        self, mover: str, token: int, suspects: Sequence[tuple[int, bytes]], *, timeout_s: float
    ) -> None:
        """As `Mover.release`, without waiting for the answer."""
        ...


@dataclass(slots=True)
class _Link:
    """One transport from one node."""

    failed_fetches: int = 0  # in a row
    failed_handshakes: int = 0  # likewise
    is_left_out: bool = False
    retry_at: float = 0.0
    incarnation: int = -1
    """This node's incarnation that the last successful piece was sent to."""
    error: str = ""

    @property
    def failures(self) -> int:
        return self.failed_fetches + self.failed_handshakes


@dataclass(slots=True)
class _Peer:
    links: defaultdict[str, _Link] = field(default_factory=lambda: defaultdict(_Link))
    last: str = ""  # the transport of the last success
    due_at: float = 0.0  # when the next handshake is due
    misses: int = 0  # handshakes in a row that failed


class PeerLinks:
    """The links from other nodes to this one. Thread-safe; a thread of its own shakes hands."""

    def __init__(
        self,
        fenced: Mapping[str, FencedSlots],
        movers: RemoteMovers,
        *,
        call_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fenced` has the transports of this node, the best first."""
        self._fenced = fenced
        self._movers = movers
        self._call_timeout_s = call_timeout_s
        self._now = now
        self._random = Random()
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        # The peers cross to it, under the lock.
        self._thread = threading.Thread(target=self._run, name="kvray-handshake", daemon=True)

    def start(self) -> None:
        """Begin the handshakes."""
        self._thread.start()

    def close(self) -> None:
        """End the handshakes. Twice is fine."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def connect(self, names: Iterable[str]) -> None:
        """Keep links to these movers, and forget all others."""
        with self._lock:
            self._peers = {name: self._peers.get(name, _Peer()) for name in names}
        self._wake.set()

    def transports_for(self, name: str) -> list[str]:
        """Return the transports that a source may choose from, the best first."""
        with self._lock:
            return self._working(self._peers.get(name, _Peer())) or list(self._fenced)

    def succeed(
        self, name: str, transport: str, incarnation: int, *, is_handshake: bool = False
    ) -> None:
        """Note that a piece arrived, sent to `incarnation` of this node's end.

        A handshake has a transport tried again. It excuses no fetch that failed: a network may lose
        large packets and let small ones pass. So the next failure leaves it out for longer.
        """
        with self._lock:
            if (peer := self._peers.get(name)) is None:
                return
            link = peer.links[transport]
            was_left_out, failed_fetches = link.is_left_out, link.failed_fetches * is_handshake
            peer.links[transport] = _Link(failed_fetches=failed_fetches, incarnation=incarnation)
            peer.last, peer.misses = transport, 0
            peer.due_at = self._now() + _AGAIN_S * (0.5 + self._random.random())
        if was_left_out:
            _log.info("%s works again from %s", transport, name)

    def fail(self, name: str, transport: str, error: str, *, is_handshake: bool = False) -> None:
        """Note that a piece failed because of its transport."""
        with self._lock:
            if (peer := self._peers.get(name)) is None:
                return
            link = peer.links[transport]
            link.failed_fetches += not is_handshake
            link.failed_handshakes += is_handshake
            link.error = error
            link.retry_at = self._now() + self._pause(link.failures)
            is_new = not link.is_left_out and link.failures >= FAILURES_MAX
            if is_new:
                link.is_left_out = True
                peer.due_at, peer.misses = 0.0, 0  # the next transport shakes hands at once
        if is_new:
            _log.warning("%s is left out from %s for now: %s", transport, name, error)

    def handshake(self) -> None:
        """Shake hands with every peer that is due; takes a second for each that is silent."""
        for name, transports in self._due():
            if not self._closing:
                self._shake(name, transports)

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for each link whose last piece failed."""
        with self._lock:
            return [
                {
                    "source": name,
                    "transport": transport,
                    "left_out": link.is_left_out,
                    "failures": link.failures,
                    "error": link.error,
                }
                for name, peer in self._peers.items()
                for transport, link in peer.links.items()
                if link.error
            ]

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_SWEEP_S)
            self._wake.clear()
            try:
                self.handshake()
            except Exception:  # noqa: BLE001 - the thread must go on; the next round tries again
                _log.exception("a handshake ended by a defect")

    def _working(self, peer: _Peer) -> list[str]:
        return [one for one in self._fenced if not peer.links[one].is_left_out]

    def _due(self) -> list[tuple[str, list[str]]]:
        now, due = self._now(), []
        incarnations = {name: fenced.incarnation for name, fenced in self._fenced.items()}
        with self._lock:
            for at, (name, peer) in enumerate(self._peers.items()):
                working = self._working(peer)
                # A source that knows a renewed end by its old address has to connect again.
                is_stale = (
                    not peer.misses
                    and peer.last in working
                    and peer.links[peer.last].incarnation != incarnations[peer.last]
                )
                if at < _PEERS_MAX and working and (is_stale or now >= peer.due_at):
                    due.append((name, working))
                due += [
                    (name, [transport])
                    for transport, link in peer.links.items()
                    if link.is_left_out and now >= link.retry_at
                ]
        return due

    def _shake(self, name: str, transports: list[str]) -> None:
        """Have a source send nothing, by the best of `transports` that it has too."""
        chosen, timeout_s = transports[0], self._call_timeout_s
        targets: dict[str, tuple[int, bytes]] = {}
        try:
            targets |= {one: self._fenced[one].target() for one in transports}
            addresses = {one: address for one, (_, address) in targets.items()}
            request = LeaseRequest(
                groups=(), lease_s=_LEASE_S, addresses=addresses, timeout_s=timeout_s / 2
            )
            lease = self._movers.lease(name, request, timeout_s=timeout_s)
            chosen = lease.transport
            order = SendOrder(token=lease.token, blocks=b"", targets=b"", timeout_s=timeout_s / 2)
            self._movers.send(name, order, timeout_s=timeout_s)
            self._movers.release(name, lease.token, (), timeout_s=timeout_s)
        except KVRayError as error:
            with self._lock:
                if (peer := self._peers.get(name)) is not None:
                    peer.misses += 1
                    peer.due_at = self._now() + self._pause(peer.misses)
                    peer.links[chosen].retry_at = peer.due_at  # if it is left out
            # A renewed end fails all that was sent to it, which says nothing of the transport.
            sent_to, _ = targets.get(chosen, (-1, b""))
            if is_link_error(error) and self._fenced[chosen].is_current(sent_to):
                self.fail(name, chosen, str(error), is_handshake=True)
        else:
            self.succeed(name, chosen, targets[chosen][0], is_handshake=True)

    def _pause(self, failures: int) -> float:
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
        return longest * (0.5 + self._random.random() / 2)


def is_link_error(error: KVRayError) -> bool:
    """Return whether a piece failed because of its transport, as far as can be told."""
    return isinstance(error, TransferError) and not isinstance(error, TransportUnavailable)
