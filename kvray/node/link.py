"""A process's link to its node's tier: the arena it has mapped, kept attached in the background.

A process has one link a directory, for all users: the engine process of rank 0 has two, scheduler
and worker. A daemon thread attaches, notices a retired arena, registers replicas with the shard,
sends their figures, and retries calls that found the arena busy. A second one populates the
mapping. An engine that started before its shard, or outlives it, joins again by itself.

Releases, aborts and late commits that found the arena busy are deferred.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from kvray.errors import KVRayError, LayoutMismatch, ShardUnavailable
from kvray.node.registration import CALL_TIMEOUT_S, Registration
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, Membership
from kvray.store.arena.prefault import Populator
from kvray.store.machine.access import OWN_USER, Access

_FLUSH_S = 0.1
"""Bound of a round, so that a locked arena does not keep the thread from other work."""
_WAITING_MAX = 4096

Deferred = Callable[[Arena], bool]
"""A call on the arena; False: busy, try again."""


_log = logging.getLogger("kvray.node")

_REPORT_S = 1.0
_LAST_REPORT_S = 0.4
_RETRY_S = 0.005
_LAST_FLUSH_S = 0.3
_LAST_STEP_S = 0.1
_LEAVE_S = 0.1
"""An engine's end beside a frozen shard that has the arena's lock takes the sum of these, and of
the saver's time: two seconds."""
_PREVIOUS_S = 10.0
"""Minimum time that a replaced arena stays mapped: the leader may still lease from it for a
moment. After that it stays as long as a living process has a lease in it."""

T = TypeVar("T")


class NodeLink:
    """This process's access to the tier in one directory; use `attach` to get it.

    It attaches at once if there is an arena, and keeps looking if there is none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        label: str,
        lock_wait_s: float,
        attach_retry_s: float,
        access: Access,
    ) -> None:
        self.directory = directory
        # Containers of a pod share a host name, and each may have the same process numbers.
        self.process_name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        """A name that no other process has."""
        self._label = label
        self._lock_wait_s = lock_wait_s
        self._attach_retry_s = attach_retry_s
        self._access = access
        self._arena: Arena | None = None
        self._populator: Populator | None = None
        self._previous: tuple[tuple[Arena, float], ...] = ()
        """Replaced arenas that are still mapped, each with the time when it may be closed."""
        self._members: list[tuple[object, object, object]] = []
        self._members_lock = threading.Lock()
        self._socket = ShardSocket(directory)
        self._registrations: tuple[Registration, ...] = ()
        """The ranks that the shard must know; each new shard is told again."""
        self._deferred: deque[tuple[Arena, Deferred]] = deque()
        self._has_lost = False  # one of them, since there were none
        self._wake = threading.Condition()
        self._closing = False
        self._warned = False
        self._defect: str | None = None
        self._pid = os.getpid()
        self._users = 0
        self._try_attach()
        self._thread = threading.Thread(target=self._run, name="kvray-link", daemon=True)
        self._thread.start()

    @property
    def arena(self) -> Arena | None:
        """The arena to use now; None: the tier is not there (or this is a forked child)."""
        arena = self._arena
        if arena is None or arena.retired or os.getpid() != self._pid:
            return None
        return arena

    def arena_named(self, arena_id: str) -> Arena | None:
        """Return the arena of that id: the present one, or an earlier one with leases.

        Leased blocks stay readable after their arena has retired: a promise is kept.
        """
        for arena in (self._arena, *(arena for arena, _ in self._previous)):
            if arena is not None and arena.arena_id == arena_id and not self._forked:
                return arena
        return None

    def member(self, owner: object, key: object, create: Callable[[], T]) -> T:
        """Return the object that `create` made once for this very `owner` and an equal `key`."""
        with self._members_lock:
            for known, known_key, made in self._members:
                if known is owner and known_key == key:
                    return cast(T, made)
            made = create()
            self._members.append((owner, key, made))
            return made

    def members(self) -> list[object]:
        """Return the objects made for all owners, the latest first."""
        with self._members_lock:
            return [made for _, _, made in reversed(self._members)]

    def register(self, registration: Registration) -> None:
        """Tell the shard of a rank, now or later.

        LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        if self._forked:
            return
        with self._members_lock:
            self._registrations = (*self._registrations, registration)
        if self.arena is None:
            return
        try:
            registration.register(self._socket, self._membership, timeout_s=CALL_TIMEOUT_S)
        except LayoutMismatch:
            self._drop(registration)
            raise
        except KVRayError as error:
            replica = registration.replica
            _log.warning("kvray: replica %s has not registered yet: %s", replica, error)

    def unregister(self, registration: Registration) -> None:
        """Forget a rank, after its last figures; they stay with the shard."""
        if self._forked or not self._drop(registration):
            return
        if self.arena is not None:
            self._attempt(lambda: self._leave(registration))

    def defer(self, arena: Arena, action: Deferred) -> None:
        """Do `action` on `arena` from the background thread until it answers True.

        One too many is lost, and logged.
        """
        if self._forked:
            return
        with self._wake:
            if len(self._deferred) < _WAITING_MAX:
                self._deferred.append((arena, action))
            elif not self._has_lost:
                self._has_lost = True
                _log.warning(
                    "kvray: the arena has been locked for too long, and calls on it are lost:"
                    " blocks may stay leased until this process ends; look for a stopped process"
                    " of this node that has the lock"
                )
            self._wake.notify()

    def detach(self) -> None:
        """Drop one user; the last one closes the link. In a forked child nothing happens."""
        if self._forked:
            return
        with _links_lock:
            self._users -= 1
            if self._users != 0:
                return
            if _links.get(self.directory) is self:
                del _links[self.directory]
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_LAST_STEP_S)
        if self._thread.is_alive():
            self._socket.interrupt()  # it waits for a shard that is busy or frozen
            self._thread.join(_LAST_STEP_S)
        self._flush_until_done()
        if self.arena is not None:
            for registration in self._registrations:
                self._attempt(partial(self._leave, registration))
        self._socket.close()
        self._stop_populating()
        for arena, _ in self._previous:
            arena.close()
        self._previous = ()
        if self._arena is not None:
            self._arena.leave(wait_s=_LEAVE_S)
            self._arena.close()
            self._arena = None

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _run(self) -> None:
        """The background thread; `_arena`, `_previous` and `_deferred` cross to it."""
        look_at = report_at = 0.0
        while True:
            with self._wake:
                if not self._closing:
                    self._wake.wait(
                        _RETRY_S if self._deferred else min(_REPORT_S, self._attach_retry_s)
                    )
                if self._closing:
                    return
            self._attempt(self._flush)
            now = time.monotonic()
            if now >= look_at:
                self._attempt(self._try_attach)
                self._attempt(self._close_previous)
                look_at = now + self._attach_retry_s
            if now >= report_at:
                self._attempt(self._report)
                report_at = now + _REPORT_S

    def _attempt(self, step: Callable[[], None]) -> None:
        """Do a step of the thread; no defect may end it, not even in a caller's function.

        Without the thread leases would stay, and the engine could never join again.
        """
        try:
            step()
        except KVRayError as error:  # a state of the tier, in one line
            if self._defect != repr(error):
                self._defect = repr(error)
                _log.warning("kvray: %s", error)
        except Exception as error:  # noqa: BLE001 - see above; it is logged
            if self._defect != repr(error):
                self._defect = repr(error)
                _log.exception("kvray: a defect in the background; the engine goes on")

    def _try_attach(self) -> None:
        """Map the arena that is there now, if it is another one."""
        if self._arena is not None and not self._arena.is_superseded:
            return
        if self._arena is not None:
            _log.info("kvray: arena %s has retired", self._arena.arena_id)
            self._stop_populating()
            # In this order: `arena_named` finds it at any time.
            self._previous = (*self._previous, (self._arena, time.monotonic() + _PREVIOUS_S))
            self._arena = None
        try:
            self._access.check_trust(self.directory)
            arena = Arena.attach(self.directory, label=self._label, lock_wait_s=self._lock_wait_s)
        except KVRayError as error:
            if not self._warned:
                _log.warning("kvray: no tier yet, the engine goes on without: %s", error)
                self._warned = True
            return
        self._arena, self._warned = arena, False
        self._populator = Populator(arena.tables)
        self._forget_answers()
        _log.info("kvray: attached to arena %s in %s", arena.arena_id, self.directory)

    def _stop_populating(self) -> None:
        if self._populator is not None:
            self._populator.stop()
            self._populator = None

    def _close_previous(self) -> None:
        """Unmap replaced arenas without leases; a lease of any living holder counts."""
        now = time.monotonic()
        for entry in self._previous:
            arena, until = entry
            if now >= until and arena.leave(unless_leased=True):
                self._previous = tuple(one for one in self._previous if one is not entry)
                arena.close()

    def _membership(self) -> tuple[str, Membership] | None:
        arena = self.arena
        return None if arena is None else (arena.arena_id, arena.membership)

    def _flush_until_done(self) -> None:
        until = time.monotonic() + _LAST_FLUSH_S
        self._attempt(self._flush)
        while self._deferred and time.monotonic() < until:
            time.sleep(_RETRY_S)
            self._attempt(self._flush)
        if self._deferred:
            _log.warning(
                "kvray: the arena stays locked; %d leases or saves end with this process",
                len(self._deferred),
            )

    def _flush(self) -> None:
        """Try each deferred call once; one that still finds its arena busy goes to the end."""
        self._has_lost &= bool(self._deferred)
        until = time.monotonic() + _FLUSH_S
        for _ in range(len(self._deferred)):
            arena, action = self._deferred.popleft()
            try:
                # Also in a retired arena: its leases keep it mapped.
                done = action(arena)
            except KVRayError as error:
                _log.debug("kvray: a deferred call has become void: %s", error)
                continue
            if not done:
                self._deferred.append((arena, action))
                if time.monotonic() > until:
                    return

    def _report(self) -> None:
        """Tell the shard of every rank, changed or not: a restarted shard knows none."""
        for registration in self._registrations if self.arena is not None else ():
            if registration not in self._registrations:
                continue  # it left since the round began
            try:
                registration.report(self._socket, self._membership, timeout_s=CALL_TIMEOUT_S)
                if registration not in self._registrations:
                    self._leave(registration)  # it left meanwhile, and this report was later
            except ShardUnavailable as error:
                self._forget_answers()
                _log.debug("kvray: no report: %s", error)
                return
            except KVRayError as error:
                if registration.refusal != str(error):
                    registration.refusal = str(error)
                    _log.error("kvray: replica %s is refused: %s", registration.replica, error)

    def _leave(self, registration: Registration) -> None:
        """Send a rank's last figures, or say that they are lost; a shard that is away costs once.

        A rank that the shard refused has no figures there.
        """
        reason: object = "the shard did not answer lately"
        if registration.told is not None:
            try:
                registration.report(
                    self._socket, self._membership, timeout_s=_LAST_REPORT_S, leaving=True
                )
                return
            except KVRayError as error:
                reason = error
                self._forget_answers()
        if registration.refusal is None:
            _log.warning(
                "kvray: the last figures of replica %s rank %d are lost: %s",
                registration.replica,
                registration.rank,
                reason,
            )

    def _forget_answers(self) -> None:
        """Tell everything again, to a new shard or connection."""
        for registration in self._registrations:
            registration.told = None

    def _drop(self, registration: Registration) -> bool:
        """Take a rank off the list; False if it is not there."""
        with self._members_lock:
            left = tuple(one for one in self._registrations if one is not registration)
            was_in, self._registrations = len(left) < len(self._registrations), left
        return was_in


_links: dict[Path, NodeLink] = {}
_links_lock = threading.Lock()


def attach(
    directory: Path,
    *,
    label: str,
    lock_wait_s: float,
    attach_retry_s: float,
    access: Access = OWN_USER,
) -> NodeLink:
    """Return this process's link to the tier in `directory`; `NodeLink.detach` gives it back.

    The first caller's values hold; `access` says whose arena is trusted. It locks the registry
    while it attaches, which takes seconds at worst: another caller for the directory needs that
    very link.
    """
    directory = directory.absolute()
    with _links_lock:
        link = _links.get(directory)
        if link is None:
            link = NodeLink(
                directory,
                label=label,
                lock_wait_s=lock_wait_s,
                attach_retry_s=attach_retry_s,
                access=access,
            )
            _links[directory] = link
        link._users += 1
        return link


def _forget_links() -> None:
    """Forget the parent's links after a fork: their threads are not here."""
    global _links_lock
    _links_lock = threading.Lock()
    _links.clear()


os.register_at_fork(after_in_child=_forget_links)
