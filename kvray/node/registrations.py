"""The ranks of this process as its node's shard knows them, and the figures it hears of them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvray.block import Namespace
from kvray.errors import KVRayError, LayoutMismatch, ShardUnavailable
from kvray.node.openings import Openings
from kvray.node.shard_socket import ShardSocket

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
    accepted: bool = False
    refusal: str | None = None
    """The shard's sentence, if it refuses."""
    has_peers: bool = False
    """Whether the shard has said that blocks may come from other nodes."""


class Registrations:
    """What the shard has to be told, and told again when it is another one. Thread-safe."""

    def __init__(self, socket: ShardSocket) -> None:
        """Tell the shard behind `socket`."""
        self._socket = socket
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
            _log.warning("kvray: not registered yet: %s", error)

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
        if not registration.accepted:
            self._register(registration)
        openings = registration.openings
        notes = openings.waiting() if openings is not None else []
        reply = self._socket.call(
            "report",
            timeout_s=timeout_s,
            replica=registration.replica,
            rank=registration.rank,
            counters=registration.counters(),
            openings=notes,
            leaving=leaving,
        )
        known = bool(reply.get("known"))
        registration.accepted = known and not leaving
        registration.has_peers = reply.get("peers") is True
        if openings is not None and known:
            openings.reported(len(notes), reply.get("incompatible", []))

    def _register(self, registration: Registration) -> None:
        self._socket.call(
            "register",
            timeout_s=_CALL_TIMEOUT_S,
            replica=registration.replica,
            rank=registration.rank,
            namespace=registration.namespace.to_wire(),
        )
        registration.accepted, registration.refusal = True, None
        if registration.openings is not None:
            registration.openings.tell_again()
