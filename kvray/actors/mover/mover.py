"""The mover: fetches blocks of other nodes into this node's arena, and sends this node's to them.

It maps the arena like any other process of the node. It has a process of its own, which a transport
may take down: leases and reservations then end by the arena's own rules. All threads may call it at
once; a fetch never waits for a send.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvray.actors.mover.fenced_slots import FencedSlots
from kvray.actors.mover.fetch_socket import FetchServer
from kvray.actors.mover.fetches import Fetches
from kvray.actors.mover.orders import (
    FetchOrder,
    FetchReport,
    LeaseRequest,
    ReadLease,
    SendOrder,
    SourceReport,
)
from kvray.actors.mover.peer_links import PeerLinks, RemoteMovers
from kvray.actors.mover.read_leases import ReadLeases
from kvray.actors.ray_glue.arguments import unpacked
from kvray.config import StagingConfig
from kvray.errors import CapacityError, KVRayError, ShardUnavailable
from kvray.store import Arena
from kvray.store.arena.prefault import Populator
from kvray.transport import open_transports

_log = logging.getLogger("kvray.mover")

LABEL = "mover"
_SWEEP_S = 0.1
_ATTACH_S = 0.2
_JOIN_TIMEOUT_S = 10.0
READ_LEASES_MAX = 256


class _Attached:
    """The parts of a mover that belong to one arena."""

    def __init__(
        self,
        arena: Arena,
        settings: StagingConfig,
        movers: RemoteMovers,
        fetch: Callable[..., FetchReport],
    ) -> None:
        self.arena = arena
        self.populator = Populator(arena.tables)
        self.transports, self.missing = open_transports(settings.transports, arena.tables.data)
        self.fenced = {name: FencedSlots(arena, one) for name, one in self.transports.items()}
        self.read_leases = ReadLeases(
            arena, self.transports, leases_max=READ_LEASES_MAX, lease_max_s=settings.lease_s
        )
        self.links = PeerLinks(self.fenced, movers, call_timeout_s=settings.call_timeout_s)
        self.fetches = Fetches(
            arena, self.transports, self.fenced, self.links, movers=movers, settings=settings
        )
        self.links.start()
        self.server: FetchServer | None = None
        with contextlib.suppress(OSError):  # no socket can be made: the shard calls over Ray
            self.server = FetchServer(arena.directory, fetch, calls_max=2 * settings.fetches_max)

    def close(self) -> None:
        """End the transports, so that nothing writes afterwards, and then leave the arena."""
        if self.server is not None:
            self.server.close()
        self.links.close()
        self.read_leases.expire(float("inf"))
        for transport in self.transports.values():
            transport.close()
        self.populator.stop()
        self.arena.close()


class Mover:
    """One node's mover; `start` it before use. Thread-safe."""

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: StagingConfig,
        movers: RemoteMovers,
        ended: Callable[[], None] = lambda: None,
        *,
        lock_wait_s: float,
    ) -> None:
        """Serve the arena in a directory, as soon as there is one.

        `movers` are those of other nodes. `ended` is called when the arena was retired or replaced,
        or after a defect in the background thread. The caller then starts another mover in another
        process.
        """
        self.name = name
        self._directory = directory
        self._settings = settings
        self._lock_wait_s = lock_wait_s
        self._movers = movers
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
            is_fetching = self._fetching > 0
        if attached is not None:
            if is_fetching:  # it may write to its slots after this
                attached.arena.stay()
            attached.close()

    def fetch(self, *packed_order: Any) -> FetchReport:
        """Fetch the blocks of a `FetchOrder`, packed or not; ends within its `deadline_s`.

        A miss, a dead peer or a busy arena raises nothing: the report says what is here and why
        not more. The slots of late blocks are reused once nothing can write them.
        """
        order: FetchOrder = unpacked(*packed_order)
        deadline = time.monotonic() + order.deadline_s
        try:
            # What is wrong here is no fault of a source, which the shard would leave alone for it.
            attached = self._require(CapacityError)
            if not self._turns.acquire(timeout=order.deadline_s):
                raise CapacityError(
                    f"{self.name} has {self._settings.fetches_max} fetches under way; raise"
                    " staging.fetches_max."
                )
        except KVRayError as error:
            report = SourceReport.of(error)
            return FetchReport(
                here=(0,) * len(order.spans), sources={one.source: report for one in order.spans}
            )
        with self._lock:
            self._fetching += 1
            self._num_fetches += bool(order.spans)
        try:
            return attached.fetches.fetch(order, deadline=deadline)
        finally:
            with self._lock:
                self._fetching -= 1
            self._turns.release()

    def connect(self, names: Iterable[str]) -> None:
        """Keep links to these movers, in the background, and forget all others."""
        attached = self._attached
        if attached is not None:  # else the shard names them again soon
            attached.links.connect(names)

    def lease(self, request: LeaseRequest) -> ReadLease:
        """See `ReadLeases.grant`; CapacityError without an arena: it sends nothing."""
        return self._require(CapacityError).read_leases.grant(request)

    def send(self, order: SendOrder) -> Any:
        """See `ReadLeases.send`; ShardUnavailable without an arena."""
        return self._require().read_leases.send(order)

    def release(self, token: int, suspects: Sequence[tuple[int, bytes]] = ()) -> None:
        """See `ReadLeases.release`; ShardUnavailable without an arena."""
        self._require().read_leases.release(token, suspects)

    def status(self) -> dict[str, Any]:
        """Return state, transports and figures, for people."""
        attached = self._attached
        if attached is None:
            return {"mover": self.name, "state": "waiting", "message": self._message}
        fetches, leases = attached.fetches, attached.read_leases
        return {
            "mover": self.name,
            "state": "serving",
            "arena_id": attached.arena.arena_id,
            "transports": {
                name: {"available": True, **one.status()}
                for name, one in attached.transports.items()
            }
            | {name: {"available": False, "reason": why} for name, why in attached.missing.items()},
            "failing_links": attached.links.status(),
            "fetches": self._num_fetches,
            "fetching": self._fetching,
            "blocks_fetched": fetches.num_blocks,
            "bytes_fetched": fetches.num_bytes,
            "bytes_sent": leases.sent_bytes.total(),
            "sent_bytes": dict(leases.sent_bytes),
            "corrupt": fetches.num_corrupt,
            "fenced_slots": sum(one.num_slots for one in attached.fenced.values()),
            "fenced_slots_total": sum(one.num_slots_total for one in attached.fenced.values()),
            "read_leases": len(leases),
        }

    def _require(self, refusal: type[KVRayError] = ShardUnavailable) -> _Attached:
        attached = self._attached
        if attached is None:
            raise refusal(f"{self.name} has no arena ({self._message}).")
        return attached

    def _run(self) -> None:
        """Background thread. `_attached` crosses; only this thread writes it before `stop`."""
        try:
            while not self._stopping.is_set():
                attached = self._attached
                if attached is None:
                    self._try_attach()
                elif attached.arena.is_superseded:
                    self._message = f"arena {attached.arena.arena_id} was given up"
                    break
                else:
                    attached.read_leases.expire(time.monotonic())
                    for fenced in attached.fenced.values():
                        fenced.settle()
                self._stopping.wait(_ATTACH_S if attached is None else _SWEEP_S)
            else:
                return
            _log.info("%s ends: %s", self.name, self._message)
        except Exception:  # noqa: BLE001 - it ends the thread; it is logged, and the mover replaced
            _log.exception("%s ended by a defect", self.name)
        self._ended()

    def _try_attach(self) -> None:
        arena = None
        try:
            arena = Arena.attach(self._directory, label=LABEL, lock_wait_s=self._lock_wait_s)
            attached = _Attached(arena, self._settings, self._movers, self.fetch)
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
