"""The shard: owner of a node's arena; evicts ahead, announces, buries the dead, serves engines.

All state belongs to one event loop in one thread. The actor around it only hands calls over.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvray.actors.announcer import Announce, Announcer
from kvray.actors.engine_server import EngineServer
from kvray.actors.replicas import Replicas
from kvray.block import Namespace
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.store import Arena, ArenaSpec, lease
from kvray.store.arena import ARENA_FILE
from kvray.store.lock import OWNER_BYTE, SideFile
from kvray.wire import SOCKET_FILE

_log = logging.getLogger("kvray.shard")

T = TypeVar("T")

OWNER_FILE = "owner"
_OWNER_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """What a shard needs to know, as plain values."""

    directory: Path
    spec: ArenaSpec
    free_target: float
    limbo_s: float
    lease_warn_s: float
    announce_s: float
    heartbeat_s: float


class Shard:
    """One node's shard; `start` it, then ask. Thread-safe."""

    def __init__(
        self,
        name: str,
        settings: ShardSettings,
        announce: Announce,
        crashed: Callable[[], None] = lambda: None,
    ) -> None:
        """Own the arena of `settings.directory`.

        Args:
            name: the shard's name, everywhere.
            settings: see there.
            announce: brings announcements to the lookup.
            crashed: called when the shard ends by a defect of its own, after it was logged.
        """
        self.name = name
        self._crashed = crashed
        self._settings = settings
        self._announcer = Announcer(name, announce)
        self._replicas = Replicas()
        self._arena: Arena | None = None
        self._state: dict[str, Any] = {"state": "starting", "done": 0, "total": 0}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._retire = False
        self._thread = threading.Thread(target=self._run, name="kvray-shard", daemon=True)

    def start(self) -> None:
        """Prepare the arena in the background; `status` tells how far it is."""
        self._thread.start()

    def stop(self, *, retire: bool, timeout_s: float) -> None:
        """End the shard; with `retire` its arena and files go too. Twice is fine."""
        if self._thread.is_alive():
            self._retire = retire
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
        if retire and not self._thread.is_alive():
            remove_files(self._settings.directory)

    def status(self) -> dict[str, Any]:
        """Return state, arena figures and replicas."""
        status = {"shard": self.name, "directory": str(self._settings.directory), **self._state}
        if self._arena is not None and self._state["state"] == "serving":
            status["arena"] = self._arena.stats()
            status["replicas"] = self._replicas.status()
        return status

    def clear(self, timeout_s: float) -> int:
        """Evict every block that nobody leases; return how many."""
        return self._on_loop(lambda: self._serving().clear()).result(timeout_s)

    def _on_loop(self, function: Callable[[], T]) -> "Future[T]":
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _serving(self) -> Arena:
        if self._arena is None:
            raise ShardUnavailable(f"{self.name} is {self._state['state']}; see `kvray status`.")
        return self._arena

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except KVRayError as error:
            _log.error("%s failed: %s", self.name, error)
            self._state = {"state": "failed", "message": str(error)}
        finally:
            self._loop.close()
            if not self._stopping.is_set() and self._state["state"] != "failed":
                self._crashed()

    async def _main(self) -> None:
        directory = self._settings.directory
        _make_directory(directory)
        owner = SideFile.at(directory / OWNER_FILE)
        await self._become_owner(owner)
        server = EngineServer(directory / SOCKET_FILE, self._handlers(), self._replicas.disconnect)
        try:
            self._arena = await self._loop.run_in_executor(None, self._open_arena)
            self._epoch = self._arena.adopt()
            await server.start()
            self._state = {"state": "serving"}
            await self._serve()
        finally:
            await server.close()
            if self._retire or self._arena is None:
                remove_files(directory)
            owner.unlock(OWNER_BYTE)

    async def _become_owner(self, owner: SideFile) -> None:
        deadline = time.monotonic() + _OWNER_WAIT_S
        while not owner.try_lock(OWNER_BYTE):
            if time.monotonic() > deadline:
                raise ShardUnavailable(
                    f"Process {owner.holder_of(OWNER_BYTE)} owns {self._settings.directory}; run"
                    " `kvray down` there, or choose another cluster_name or arena.dir."
                )
            await asyncio.sleep(0.1)

    def _open_arena(self) -> Arena:
        """Adopt the arena that is there if it is the one we would make, else make a new one."""
        settings = self._settings
        try:
            arena = Arena(settings.directory, lock_wait_s=0.1)
        except ShardUnavailable:
            arena = None
        if arena is not None:
            if arena.tables.geometry == settings.spec.geometry() and not arena.retired:
                return arena
            _log.warning(
                "%s: the arena has other sizes than configured; making a new one", self.name
            )
            arena.retire()
        _remove_leftovers(settings.directory)
        return Arena.create(
            settings.directory, settings.spec, lock_wait_s=0.1, progress=self._progress
        )

    def _progress(self, done: int, total: int) -> None:
        self._state = {"state": "preparing", "done": done, "total": total}

    def _handlers(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"hello": self._hello, "register": self._register, "report": self._report}

    def _hello(self, connection: int) -> dict[str, Any]:
        arena = self._serving()
        return {"shard": self.name, "arena_id": arena.arena_id, "shard_epoch": self._epoch}

    def _register(
        self, connection: int, replica: str, rank: int, namespace: dict[str, Any]
    ) -> dict[str, Any]:
        self._replicas.register(connection, replica, rank, Namespace.from_wire(namespace))
        return {}

    def _report(
        self, connection: int, replica: str, rank: int, counters: dict[str, int]
    ) -> dict[str, Any]:
        return {"known": self._replicas.report(connection, replica, rank, counters)}

    async def _serve(self) -> None:
        """Do the shard's regular work until told to stop."""
        settings, arena = self._settings, self._serving()
        heartbeat_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            due = now >= heartbeat_at
            if due:
                heartbeat_at = now + settings.heartbeat_s
                self._bury_and_warn(arena)
            arena.evict_ahead(settings.free_target)
            if self._announcer.collect(arena) or due:
                await self._loop.run_in_executor(None, self._announcer.send, self._epoch)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), settings.announce_s)

    def _bury_and_warn(self, arena: Arena) -> None:
        for label in arena.bury_dead(limbo_s=self._settings.limbo_s):
            _log.warning("%s: holder %s died; its leases ended", self.name, label)
        before = time.monotonic() - self._settings.lease_warn_s
        for row, count in lease.long_leases(arena.tables, before=before):
            label = bytes(arena.tables.holder_label[row]).decode(errors="replace")
            _log.warning("%s: holder %s has leased %d slots for long", self.name, label, count)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The arena's directory {directory} cannot be made ({error.strerror}); set arena.dir"
            " to a tmpfs that this user may write to."
        ) from None
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(f"{directory} belongs to another user; choose another cluster_name.")


def _remove_leftovers(directory: Path) -> None:
    """Remove what an owner that died left behind: half-made arenas, locks of arenas long gone."""
    for pattern in ("arena.*.new", "lock.*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def remove_files(directory: Path) -> None:
    """Retire the arena in `directory`, if there is one, and remove everything that is ours."""
    with contextlib.suppress(ShardUnavailable):
        Arena(directory, lock_wait_s=0.1).retire()
    _remove_leftovers(directory)
    for name in (ARENA_FILE, OWNER_FILE, SOCKET_FILE):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
