"""The ranks of this process as its node's shard knows them, and the figures it hears of them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvray.block import Namespace
from kvray.errors import KVRayError, LayoutMismatch, ShardUnavailable
from kvray.node.openings import Openings
from kvray.node.request_notes import RequestNotes, packed
from kvray.node.shard_socket import ShardSocket
from kvray.store import Membership, Wanted

_log = logging.getLogger("kvray.node")

_CALL_TIMEOUT_S = 2.0
_LAST_REPORT_S = 0.5


@dataclass(slots=True, kw_only=True)
class Registration:
    """One rank of one replica, as its shard knows it."""

    replica: str
    rank: int
    namespace: Namespace
    counters: Callable[[], dict[str, int]]
    """Figures for `kvray status`: totals since the engine started."""
    openings: Openings | None = None
    """What the rank notes of its prompts; None if it notes nothing."""
    requests: RequestNotes | None = None
    """What it notes of its requests; None if it notes nothing."""
    wanted: tuple[Wanted, ...] = (Wanted(0),)
    """The parts that its leases must have."""
    num_ranks: int = 1
    """Ranks that it speaks for, or is spoken for with; 1: itself alone."""
    adapters: str | None = None
    """How its engine reads LoRA adapters; None if it knows of none."""
    tenants: str | None = None
    """`TenantSalts.check` of the secret that its salts are derived with; None: they are not."""
    accepted: bool = False
    refusal: str | None = None
    """The shard's sentence, if it refuses."""
    has_peers: bool = False
    """Whether the shard has said that it may bring blocks here, from other nodes or from disk."""
    former: str | None = None
    """What the replica was called when the shard was told last, if it has another name now."""

    def rename(self, replica: str) -> None:
        """Have it registered as a rank of `replica`, with the next report."""
        if replica != self.replica:
            former = self.former or self.replica
            # In this order: the thread that reports must not take the former name for the new one.
            self.replica = replica
            self.former = former


class Registrations:
    """What the shard has to be told, and told again when it is another one. Thread-safe."""

    def __init__(
        self, socket: ShardSocket, membership: Callable[[], tuple[str, Membership] | None]
    ) -> None:
        """Tell the shard behind `socket`.

        Args:
            socket: of the node's shard.
            membership: returns the arena of this process, and its row there.
        """
        self._socket = socket
        self._membership = membership
        self._lock = threading.Lock()
        self._all: list[Registration] = []

    def add(self, registration: Registration, *, tell: bool) -> None:
        """Take a rank in; `tell` the shard now, else the next `report` does.

        Raises:
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        with self._lock:
            self._all.append(registration)
        if not tell:
            return
        try:
            self._register(registration)
        except LayoutMismatch:
            self.remove(registration)
            raise
        except KVRayError as error:
            _log.warning(
                "kvray: replica %s has not registered yet: %s", registration.replica, error
            )

    def remove(self, registration: Registration) -> bool:
        """Leave a rank out from now on; False if it was not in."""
        with self._lock:
            left = [one for one in self._all if one is not registration]
            was_in = len(left) < len(self._all)
            self._all = left
        return was_in

    def forget_answers(self) -> None:
        """Note that there is a new shard or connection, which has to hear all again."""
        with self._lock:
            for registration in self._all:
                registration.accepted = False

    def report(self) -> None:
        """Tell the shard of every rank, changed or not: a shard that was restarted knows none."""
        for registration in list(self._all):
            if not any(one is registration for one in self._all):
                continue  # It left since the list was taken.
            try:
                self._report(registration, timeout_s=_CALL_TIMEOUT_S, leaving=False)
            except ShardUnavailable as error:
                self.forget_answers()
                _log.debug("kvray: no report: %s", error)
                return
            except KVRayError as error:
                if registration.refusal != str(error):
                    registration.refusal = str(error)
                    _log.error("kvray: replica %s is refused: %s", registration.replica, error)

    def report_last(self, registration: Registration) -> None:
        """Leave a rank's last figures with the shard.

        Raises:
            KVRayError: the shard did not take them.
        """
        self._report(registration, timeout_s=_LAST_REPORT_S, leaving=True)

    def _report(self, registration: Registration, *, timeout_s: float, leaving: bool) -> None:
        if registration.former is not None:
            self._leave(registration, registration.former)
        if not registration.accepted:
            self._register(registration)
        openings, requests = registration.openings, registration.requests
        notes = openings.waiting() if openings is not None else []
        asked = requests.take() if requests is not None else []
        try:
            reply = self._socket.call(
                "report",
                timeout_s=timeout_s,
                replica=registration.replica,
                rank=registration.rank,
                counters=registration.counters(),
                openings=notes,
                requests=packed(asked),
                leaving=leaving,
            )
        except ShardUnavailable:
            if requests is not None:
                requests.give_back(asked)
            raise
        known = bool(reply.get("known"))
        if requests is not None and not known:
            requests.give_back(asked)
        registration.accepted = known and not leaving
        registration.has_peers = reply.get("peers") is True
        if openings is not None and known:
            openings.reported(len(notes), reply.get("incompatible", []))

    def _leave(self, registration: Registration, former: str) -> None:
        """Take a rank's former name off the list; its figures go on under the new one."""
        registration.accepted = False
        self._socket.call(
            "report",
            timeout_s=_CALL_TIMEOUT_S,
            replica=former,
            rank=registration.rank,
            counters={},
            leaving=True,
        )
        registration.former = None

    def _register(self, registration: Registration) -> None:
        membership = self._membership()
        reply = self._socket.call(
            "register",
            timeout_s=_CALL_TIMEOUT_S,
            replica=registration.replica,
            rank=registration.rank,
            namespace=registration.namespace.to_wire(),
            wanted=[list(one) for one in registration.wanted],
            num_ranks=registration.num_ranks,
            holder=None if membership is None else [membership[0], *membership[1]],
            adapters=registration.adapters,
            tenants=registration.tenants,
        )
        # Else it has been told of a place in an arena that was left meanwhile.
        registration.accepted = membership == self._membership()
        registration.has_peers = reply.get("peers") is True
        registration.refusal = None
        if registration.openings is not None:
            registration.openings.tell_again()
