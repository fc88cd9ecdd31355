"""The mover: brings blocks of other nodes into this node's arena, and sends its own to them.

It maps the arena like any other process of the node, in a process of its own: a transport may take
that down with it, and then leases and reservations end by the arena's own rules. All threads may
call it at once; fetching here never waits for sending from here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.actors.acquaintances import Acquaintances, Peer
from kvray.actors.doubts import Doubts
from kvray.actors.fetches import Fetches, FetchSettings
from kvray.actors.offers import Offers
from kvray.actors.orders import FetchOrder, FetchReport, Offer, SendOrder, SourceReport, Want
from kvray.errors import KVRayError, ShardUnavailable
from kvray.store import Arena
from kvray.store.arena_file import ARENA_FILE, holds_arena
from kvray.store.prefault import Populator
from kvray.transport import open_transports

__all__ = ["Mover", "MoverSettings", "Peer"]

_log = logging.getLogger("kvray.mover")

LABEL = "mover"
_SWEEP_S = 0.1
_ATTACH_S = 0.2
_JOIN_TIMEOUT_S = 10.0
OFFERS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSettings:
    """What a mover needs to know, as plain values."""

    directory: Path
    lock_wait_s: float
    transports: tuple[str, ...]
    """The best first."""
    call_timeout_s: float
    lease_s: float
    fetches_max: int
    bytes_in_flight: int


class _Attached:
    """What a mover has of one arena."""

    def __init__(self, arena: Arena, settings: MoverSettings, peer: Callable[[str], Peer]) -> None:
        self.arena = arena
        self.populator = Populator(arena.tables)
        self.transports, self.missing = open_transports(settings.transports, arena.tables.data)
        self.doubts = {name: Doubts(arena, one) for name, one in self.transports.items()}
        self.offers = Offers(
            arena, self.transports, offers_max=OFFERS_MAX, lease_max_s=settings.lease_s
        )
        self.acquaintances = Acquaintances(
            self.doubts, peer, call_timeout_s=settings.call_timeout_s
        )
        self.fetches = Fetches(
            arena,
            self.transports,
            self.doubts,
            self.acquaintances,
            FetchSettings(
                call_timeout_s=settings.call_timeout_s,
                lease_s=settings.lease_s,
                bytes_in_flight=settings.bytes_in_flight,
            ),
        )
        self.acquaintances.start()

    def close(self) -> None:
        """End the transports before the arena is left: then nothing can land any more."""
        self.acquaintances.close()
        self.offers.close()
        for transport in self.transports.values():
            transport.close()
        self.populator.stop()
        self.arena.close()


class Mover:
    """One node's mover; `start` it, then ask. Thread-safe."""

    def __init__(
        self,
        name: str,
        settings: MoverSettings,
        peer: Callable[[str], Peer],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Move blocks of the arena in `settings.directory`, as soon as there is one.

        Args:
            name: the mover's name, everywhere.
            settings: see there.
            peer: the mover of another name; raises ShardUnavailable if there is none.
            ended: called when the arena was retired or replaced, or by a defect of the mover's own
                background work: start another mover, in a process of its own.
        """
        self.name = name
        self._settings = settings
        self._peer = peer
        self._ended = ended
        self._attached: _Attached | None = None
        self._message = "it has not looked for an arena yet"
        self._turns = threading.BoundedSemaphore(settings.fetches_max)
        self._fetching = 0
        self._num_fetches = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-mover", daemon=True)

    def start(self) -> None:
        """Attach to the arena in the background; `status` tells when it has."""
        self._thread.start()

    def stop(self) -> None:
        """End transports and leases, and leave the arena. Twice is fine."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
        with self._lock:
            attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    def fetch(self, order: FetchOrder) -> FetchReport:
        """Bring the blocks of an order here; ends within its `deadline_s`.

        A miss, a dead peer or a busy arena is no exception: the report says what is here and why
        not more. What is late is given up, and its slots are reused when nothing can write there.
        """
        deadline = time.monotonic() + order.deadline_s
        try:
            attached = self._require()
            if not self._turns.acquire(timeout=order.deadline_s):
                raise ShardUnavailable(
                    f"{self.name} has {self._settings.fetches_max} fetches under way; raise"
                    " staging.fetches_max."
                )
        except KVRayError as error:
            return _refused(order, error)
        with self._lock:
            self._fetching += 1
            self._num_fetches += bool(order.spans)
        try:
            return attached.fetches.fetch(order, deadline=deadline)
        finally:
            with self._lock:
                self._fetching -= 1
            self._turns.release()

    def meet(self, names: Iterable[str]) -> None:
        """Connect with these movers in the background, and forget all others."""
        attached = self._attached
        if attached is not None:  # else they are named again before there is much to fetch
            attached.acquaintances.meet(names)

    def offer(self, want: Want) -> Offer:
        """Lease blocks for the mover of another node; see `Offers.make`.

        Raises:
            CapacityError, ShardUnavailable, TransportUnavailable: see there.
        """
        return self._require().offers.make(want)

    def send(self, order: SendOrder) -> Any:
        """Send a piece of an offer; see `Offers.send`.

        Raises:
            LeaseExpired, ShardUnavailable, TransferError: see there.
        """
        return self._require().offers.send(order)

    def release(self, token: int, suspects: bytes) -> None:
        """End an offer; see `Offers.release`.

        Raises:
            ShardUnavailable: this mover has no arena.
        """
        self._require().offers.release(token, suspects)

    def status(self) -> dict[str, Any]:
        """Return state, transports and figures, for people."""
        attached = self._attached
        if attached is None:
            return {"mover": self.name, "state": "waiting", "message": self._message}
        fetches, offers = attached.fetches, attached.offers
        return {
            "mover": self.name,
            "state": "serving",
            "arena_id": attached.arena.arena_id,
            "transports": {
                name: {"available": True, **one.status()}
                for name, one in attached.transports.items()
            }
            | {name: {"available": False, "reason": why} for name, why in attached.missing.items()},
            "troubled_ways": attached.acquaintances.status(),
            "fetches": self._num_fetches,
            "fetching": self._fetching,
            "blocks_fetched": fetches.num_blocks,
            "bytes_fetched": fetches.num_bytes,
            "bytes_sent": offers.sent_bytes.total(),
            "sent_bytes": dict(offers.sent_bytes),
            "corrupt": fetches.num_corrupt,
            "doubtful_slots": sum(one.num_slots for one in attached.doubts.values()),
            "doubtful_slots_total": sum(one.num_slots_total for one in attached.doubts.values()),
            "offers": len(offers),
        }

    def _require(self) -> _Attached:
        attached = self._attached
        if attached is None:
            raise ShardUnavailable(f"{self.name} has no arena ({self._message}).")
        return attached

    def _run(self) -> None:
        """Background thread. What crosses: `_attached`, written here until the mover is stopped."""
        try:
            while not self._stopping.is_set():
                attached = self._attached
                if attached is None:
                    self._try_attach()
                elif self._is_superseded(attached.arena):
                    self._message = f"arena {attached.arena.arena_id} was given up"
                    break
                else:
                    attached.offers.expire()
                    for doubts in attached.doubts.values():
                        doubts.settle()
                self._stopping.wait(_ATTACH_S if attached is None else _SWEEP_S)
            else:
                return
            _log.info("%s ends: %s", self.name, self._message)
        except Exception:  # noqa: BLE001 - the thread's end; it is logged and acted upon
            _log.exception("%s ended by a defect", self.name)
        self._ended()

    def _try_attach(self) -> None:
        settings = self._settings
        arena = None
        try:
            arena = Arena(settings.directory, lock_wait_s=settings.lock_wait_s)
            arena.join(LABEL)
            attached = _Attached(arena, settings, self._peer)
        except KVRayError as error:
            self._message = str(error)
            if arena is not None:
                arena.close()
            return
        for name, why in attached.missing.items():
            _log.warning("%s has no transport %s: %s", self.name, name, why)
        with self._lock:
            self._attached = attached
        _log.info("%s attached to arena %s", self.name, arena.arena_id)

    def _is_superseded(self, arena: Arena) -> bool:
        """Whether `arena` was given up, or its file removed by hand and another made."""
        path = self._settings.directory / ARENA_FILE
        return arena.retired or (path.exists() and not holds_arena(path, arena.arena_id))


def _refused(order: FetchOrder, error: KVRayError) -> FetchReport:
    """Return the report of an order that nothing was done for."""
    report = SourceReport(
        num_blocks=0,
        num_bytes=0,
        seconds=0.0,
        transport="",
        error=type(error).__name__,
        message=str(error),
    )
    return FetchReport(
        here=(0,) * len(order.spans), sources={span.source: report for span in order.spans}
    )
