"""A process's link to its node's tier: the arena it has mapped, kept attached in the background.

One link a directory and process, shared by all who ask (a rank-0 engine process has a scheduler
and a worker). A daemon thread attaches, notices a retired arena, registers replicas with the
shard, sends their figures, and retries what found the arena busy. An engine that started before
its shard, or outlives it, joins again by itself.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvray.block import Namespace
from kvray.errors import CapacityError, KVRayError, LayoutMismatch, ShardUnavailable
from kvray.node.shard_socket import ShardSocket
from kvray.store import Arena

_log = logging.getLogger("kvray.node")

_CALL_TIMEOUT_S = 2.0
_REPORT_S = 1.0
_RETRY_S = 0.005
_DEFERRED_MAX = 4096

Deferred = Callable[[Arena], bool]
"""Something to do with the arena; False: busy, try again."""


@dataclass(slots=True, kw_only=True)
class Registration:
    """One rank of one replica, as its shard knows it."""

    replica: str
    rank: int
    namespace: Namespace
    counters: Callable[[], dict[str, int]]
    """Figures for `kvray status`: totals since the engine started."""
    accepted: bool = False
    refusal: str | None = None
    """The shard's sentence, if it refused."""
    reported: dict[str, int] = field(default_factory=dict)


class NodeLink:
    """This process's access to the tier in one directory; use `attach` to get it."""

    def __init__(
        self, directory: Path, *, label: str, lock_wait_s: float, attach_retry_s: float
    ) -> None:
        """Attach at once if there is an arena, and keep looking if there is none."""
        self.directory = directory
        self._label = label
        self._lock_wait_s = lock_wait_s
        self._attach_retry_s = attach_retry_s
        self._arena: Arena | None = None
        self._socket = ShardSocket(directory)
        self._registrations: list[Registration] = []
        self._deferred: deque[tuple[Arena, Deferred]] = deque(maxlen=_DEFERRED_MAX)
        self._wake = threading.Condition()
        self._closing = False
        self._warned = False
        self._pid = os.getpid()
        self._users = 0
        self._try_attach()
        self._thread = threading.Thread(target=self._run, name="kvray-link", daemon=True)
        self._thread.start()

    @property
    def arena(self) -> Arena | None:
        """The arena to use now; None: the tier is not there (or this is a forked child)."""
        arena = self._arena
        usable = arena is not None and not arena.retired and os.getpid() == self._pid
        return arena if usable else None

    def register(self, registration: Registration) -> None:
        """Tell the shard of a rank, now if it answers, else as soon as it does.

        Raises:
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        with self._wake:
            self._registrations.append(registration)
        if self.arena is not None:
            try:
                self._send_registration(registration)
            except LayoutMismatch:
                self.unregister(registration)
                raise
            except KVRayError as error:
                _log.warning("kvray: not registered yet: %s", error)

    def unregister(self, registration: Registration) -> None:
        """Forget a rank; its last figures stay with the shard."""
        with self._wake:
            if registration in self._registrations:
                self._registrations.remove(registration)

    def defer(self, arena: Arena, action: Deferred) -> None:
        """Do `action` on `arena` from the background thread until it answers True."""
        with self._wake:
            self._deferred.append((arena, action))
            self._wake.notify()

    def call(
        self, op: str, *, timeout_s: float = _CALL_TIMEOUT_S, **fields: object
    ) -> dict[str, object]:
        """Ask this node's shard; raises as `ShardSocket.call`."""
        return self._socket.call(op, timeout_s=timeout_s, **fields)

    def detach(self) -> None:
        """One user less; the last one closes the link."""
        with _links_lock:
            self._users -= 1
            if self._users > 0:
                return
            _links.pop(self.directory, None)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=10)
        self._flush()
        self._report()
        self._socket.close()
        if self._arena is not None:
            self._arena.leave()
            self._arena = None

    def _run(self) -> None:
        """Background thread. What crosses: `_arena` (written here alone), `_deferred`."""
        look_at = report_at = 0.0
        while not self._closing:
            with self._wake:
                self._wake.wait(
                    _RETRY_S if self._deferred else min(_REPORT_S, self._attach_retry_s)
                )
            self._flush()
            now = time.monotonic()
            if now >= look_at:
                self._try_attach()
                look_at = now + self._attach_retry_s
            if now >= report_at:
                self._report()
                report_at = now + _REPORT_S

    def _try_attach(self) -> None:
        """Map the arena that is there now, if it is not the one we have."""
        if self._arena is not None and not self._arena.retired:
            return
        if self._arena is not None:
            self._arena.leave()
            self._arena = None
        try:
            arena = Arena(self.directory, lock_wait_s=self._lock_wait_s)
            arena.join(self._label)
        except (ShardUnavailable, CapacityError) as error:
            if not self._warned:
                _log.warning("kvray: no tier yet, the engine goes on without: %s", error)
                self._warned = True
            return
        self._arena, self._warned = arena, False
        for registration in self._registrations:
            registration.accepted, registration.reported = False, {}
        _log.info("kvray: attached to arena %s in %s", arena.arena_id, self.directory)

    def _flush(self) -> None:
        """Do what was deferred; what is still busy goes back to the end."""
        for _ in range(len(self._deferred)):
            arena, action = self._deferred.popleft()
            if not arena.retired and not action(arena):
                self._deferred.append((arena, action))

    def _report(self) -> None:
        if self.arena is None:
            return
        with self._wake:
            registrations = list(self._registrations)
        for registration in registrations:
            try:
                if not registration.accepted and registration.refusal is None:
                    self._send_registration(registration)
                counters = registration.counters()
                if counters != registration.reported:
                    replica, rank = registration.replica, registration.rank
                    reply = self.call("report", replica=replica, rank=rank, counters=counters)
                    registration.accepted = bool(reply["known"])
                    registration.reported = counters if registration.accepted else {}
            except LayoutMismatch as error:
                registration.refusal = str(error)
                _log.error("kvray: %s", error)
            except KVRayError as error:
                # The next connection is a new one to the shard: it has to hear all again.
                for each in registrations:
                    each.accepted, each.reported = False, {}
                _log.debug("kvray: no report: %s", error)
                return

    def _send_registration(self, registration: Registration) -> None:
        self.call(
            "register",
            replica=registration.replica,
            rank=registration.rank,
            namespace=registration.namespace.to_wire(),
        )
        registration.accepted = True


_links: dict[Path, NodeLink] = {}
_links_lock = threading.Lock()


def attach(directory: Path, *, label: str, lock_wait_s: float, attach_retry_s: float) -> NodeLink:
    """Return this process's link to the tier in `directory`; `NodeLink.detach` gives it back.

    Args:
        directory: `KVRayConfig.node_dir`.
        label: who this process is, for people.
        lock_wait_s: longest try for the arena's lock.
        attach_retry_s: how often to look for an arena while there is none.
    """
    directory = directory.absolute()
    with _links_lock:
        link = _links.get(directory)
        if link is None or link._pid != os.getpid():
            link = NodeLink(
                directory, label=label, lock_wait_s=lock_wait_s, attach_retry_s=attach_retry_s
            )
            _links[directory] = link
        link._users += 1
        return link
