"""The movers of other nodes, met before anything is fetched from them, and the ways to them.

The first piece that comes from a node takes much longer than the next: actors are looked up and
connections made. So each node is greeted when it appears, and again from time to time, which moves
nothing: the greeting is an offer of no blocks and a piece without any.

A transport that both ends have may still not work between them, where a firewall lets only Ray's
ports through. One that failed several times in a row, with nothing in between that came by it, is
left out of what a source is offered, so that the next one is used; greetings try it again, and a
request only after one of them has arrived.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvray.actors.doubts import Doubts
from kvray.actors.orders import Offer, SendOrder, Want
from kvray.errors import KVRayError, TransferError, TransportUnavailable

_log = logging.getLogger("kvray.mover")

FAILURES_MAX = 2
"""Failures in a row after which a transport is left out."""
_AGAIN_S = 60.0
"""A node from which nothing came for so long is greeted again: connections do not last for ever."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 120.0
_MET_MAX = 128
"""Nodes that are greeted; from others too can be fetched, the first piece just takes longer."""
_LEASE_S = 1.0
_SWEEP_S = 0.25
_JOIN_TIMEOUT_S = 5.0


class Peer(Protocol):
    """The mover of another node; calls end within `timeout_s`, if need be with an error of ours."""

    def offer(self, want: Want, *, timeout_s: float) -> Offer:
        """See `Mover.offer`."""
        ...

    def send(self, order: SendOrder, *, timeout_s: float) -> Any:
        """See `Mover.send`."""
        ...

    def release(self, token: int, suspects: bytes, *, timeout_s: float) -> None:
        """See `Mover.release`; does not wait for the answer."""
        ...


@dataclass(slots=True)
class _Way:
    """What is known of one transport from one node."""

    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    incarnation: int = -1
    """Of this node's end, to which the last that came was sent."""
    error: str = ""

    @property
    def is_left_out(self) -> bool:
        return self.failures >= FAILURES_MAX


@dataclass(slots=True)
class _Source:
    """One node from which blocks may come."""

    ways: dict[str, _Way] = field(default_factory=dict)
    last: str = ""
    """The transport by which something came last."""
    greet_at: float = 0.0
    misses: int = 0
    """Greetings in a row that did not arrive."""

    def way(self, transport: str) -> _Way:
        return self.ways.setdefault(transport, _Way())

    def is_left_out(self, transport: str) -> bool:
        return transport in self.ways and self.ways[transport].is_left_out


class Acquaintances:
    """The ways from other nodes to this one. Thread-safe; greets in a thread of its own."""

    def __init__(
        self,
        doubts: Mapping[str, Doubts],
        peer: Callable[[str], Peer],
        *,
        call_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nobody yet.

        Args:
            doubts: of each transport of this node, the best first.
            peer: the mover of that name; raises ShardUnavailable if there is none.
            call_timeout_s: how long a mover may take to answer.
            now: monotonic seconds.
        """
        self._doubts = doubts
        self._peer = peer
        self._call_timeout_s = call_timeout_s
        self._now = now
        self._random = Random()
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        # What crosses: the sources, under the lock.
        self._thread = threading.Thread(target=self._run, name="kvray-greeter", daemon=True)

    def start(self) -> None:
        """Greet whom `meet` names, from now on."""
        self._thread.start()

    def close(self) -> None:
        """Greet nobody any more. Twice is fine."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def meet(self, names: Iterable[str]) -> None:
        """Have these movers, and no others, greeted; what is known of others is forgotten."""
        wanted = list(names)[:_MET_MAX]
        with self._lock:
            self._sources = {name: self._sources.get(name, _Source()) for name in wanted}
        self._wake.set()

    def peer(self, name: str) -> Peer:
        """Return the mover of that name.

        Raises:
            ShardUnavailable: there is none.
        """
        return self._peer(name)

    def offered(self, name: str) -> list[str]:
        """Return the transports that a source may choose from, the best first."""
        with self._lock:
            source = self._sources.get(name, _Source())
            good = [one for one in self._doubts if not source.is_left_out(one)]
        return good or list(self._doubts)

    def succeed(self, name: str, transport: str, incarnation: int) -> None:
        """Something came from a source by a transport, to this node's end of that incarnation."""
        with self._lock:
            source = self._sources.get(name)
            if source is None:
                return
            way = source.way(transport)
            was_left_out = way.is_left_out
            source.ways[transport] = _Way(incarnation=incarnation)
            source.last, source.misses = transport, 0
            source.greet_at = self._now() + _AGAIN_S * (0.5 + self._random.random())
        if was_left_out:
            _log.info("blocks of %s come by %s again", name, transport)

    def fail(self, name: str, transport: str, error: str) -> None:
        """What a source sent by a transport did not come, and why."""
        with self._lock:
            source = self._sources.get(name)
            if source is None:
                return
            way = source.way(transport)
            way.failures += 1
            way.error = error
            way.retry_at = self._now() + self._pause(way.failures)
            is_new = way.failures == FAILURES_MAX
            if is_new:
                source.greet_at, source.misses = 0.0, 0  # by the next transport
        if is_new:
            _log.warning("%s is left out from %s for now: %s", transport, name, error)

    def greet(self) -> None:
        """Greet everybody who is due; takes a second for each who does not answer."""
        for name, transports in self._due():
            if self._closing:
                return
            self._greet(name, transports)

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for each transport that failed last with a node."""
        with self._lock:
            return [
                {
                    "source": name,
                    "transport": transport,
                    "left_out": way.is_left_out,
                    "failures": way.failures,
                    "error": way.error,
                }
                for name, source in self._sources.items()
                for transport, way in source.ways.items()
                if way.failures
            ]

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_SWEEP_S)
            self._wake.clear()
            try:
                self.greet()
            except Exception:  # noqa: BLE001 - nobody waits for it; the next round tries again
                _log.exception("greeting another mover ended by a defect")

    def _due(self) -> list[tuple[str, list[str]]]:
        """Return whom to greet now, and the transports to choose from."""
        now = self._now()
        incarnations = {name: doubts.incarnation for name, doubts in self._doubts.items()}
        due: list[tuple[str, list[str]]] = []
        with self._lock:
            for name, source in self._sources.items():
                good = [one for one in self._doubts if not source.is_left_out(one)]
                # Who knows an end that was ended meanwhile has to connect anew.
                is_stale = (
                    not source.misses
                    and source.last in good
                    and source.ways[source.last].incarnation != incarnations[source.last]
                )
                if good and (is_stale or now >= source.greet_at):
                    due.append((name, good))
                due += [
                    (name, [transport])
                    for transport, way in source.ways.items()
                    if way.is_left_out and now >= way.retry_at
                ]
        return due

    def _greet(self, name: str, transports: list[str]) -> None:
        """Have a source send nothing, by the best of `transports` that it has too."""
        chosen, incarnations, addresses = transports[0], {}, {}
        try:
            for one in transports:
                incarnations[one], addresses[one] = self._doubts[one].target()
            peer = self._peer(name)
            want = Want(groups=(), lease_s=_LEASE_S, addresses=addresses)
            offer = peer.offer(want, timeout_s=self._call_timeout_s)
            chosen = offer.transport
            order = SendOrder(
                token=offer.token, blocks=b"", targets=b"", timeout_s=self._call_timeout_s / 2
            )
            peer.send(order, timeout_s=self._call_timeout_s)
            peer.release(offer.token, b"", timeout_s=self._call_timeout_s)
        except KVRayError as error:
            self._postpone(name, chosen)
            # Behind a fence whatever is under way fails, and the transport is none the worse.
            is_current = incarnations.get(chosen) == self._doubts[chosen].incarnation
            if is_of_the_way(error) and is_current:
                self.fail(name, chosen, str(error))
        else:
            self.succeed(name, chosen, incarnations[chosen])

    def _postpone(self, name: str, transport: str) -> None:
        """Greet a source, and by a transport that is left out, later."""
        with self._lock:
            source = self._sources.get(name)
            if source is not None:
                source.misses += 1
                source.greet_at = self._now() + self._pause(source.misses)
                source.way(transport).retry_at = source.greet_at

    def _pause(self, failures: int) -> float:
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
        return longest * (0.5 + self._random.random() / 2)


def is_of_the_way(error: KVRayError) -> bool:
    """Return whether a piece did not come because of its transport, as far as can be told."""
    return isinstance(error, TransferError) and not isinstance(error, TransportUnavailable)
