"""The shard: owns a node's arena, evicts, announces, frees the leases of the dead, serves engines.

All state belongs to one event loop in one thread. The actor around it only hands calls over.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvray.actors.owner.claim import Claim
from kvray.actors.owner.ownership import let_in, remove_files, sweep
from kvray.actors.shard.actor_requests import ActorRequests
from kvray.actors.shard.adoption import open_arena
from kvray.actors.shard.announcer import Announcer
from kvray.actors.shard.engine_requests import EngineRequests
from kvray.actors.shard.engine_server import EngineServer, check_path
from kvray.actors.shard.loop_thread import LoopThread, pause
from kvray.actors.shard.serving import Serving, ShardParts
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.traffic import Traffic
from kvray.actors.staging.peers import Ask, ask_nobody
from kvray.errors import CapacityError, ConfigError, KVRayError, ShardUnavailable
from kvray.identity.tenant import TenantSalts
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.prefault import Populator
from kvray.store.machine.access import Access
from kvray.wire import SOCKET_FILE

_log = logging.getLogger("kvray.shard")

_RETRY_S = 0.1
_LOST_RETRY_S = 1.0
"""How often the shard tries to replace an arena whose files were removed."""
_FAILED_RETRY_S = 30.0
"""How soon it tries again to have a directory, or memory, that it was refused."""


class Shard:
    """One node's shard; `start` it, then ask. Thread-safe."""

    def __init__(
        self,
        name: str,
        settings: ShardSettings,
        crashed: Callable[[], None] = lambda: None,
        *,
        ask: Ask = ask_nobody,
        is_restart: bool = False,
    ) -> None:
        """Own the arena of `settings.directory`.

        `crashed` is called after the shard has ended by a defect and logged it. With `is_restart` a
        shard with these settings has run here before; then it also serves without the directory of
        its NVMe tier.
        """
        self.name = name
        self._began_at = time.monotonic()
        self._is_restart = is_restart
        self._lost = ""  # why its last arena was lost; empty if it was not
        self._crashed = crashed
        self._settings = settings
        self._serving: Serving | None = None
        self._loop = LoopThread(name, self._main, self._ended)
        self.announcer = Announcer(settings.lookup_partitions)
        self._parts = ShardParts(
            name=name,
            settings=settings,
            loop=self._loop,
            announcer=self.announcer,
            ask=ask,
            serving=self._require_serving,
            traffic=Traffic(settings),
        )
        self.requests = ActorRequests(self._parts)
        self._state: dict[str, Any] = {"state": "starting", "done": 0, "total": 0}
        self._stopping = asyncio.Event()
        self._retire = self._only_new = self._flushes = False
        self._is_new = False  # whether it has made the arena that it serves

    def start(self) -> None:
        """Prepare the arena in the background; `status` shows the progress."""
        self._loop.start()

    def refuse(self, error: KVRayError) -> None:
        """Stay without an arena, instead of `start`; `status` says why."""
        self._ended(error)

    def stop(
        self, *, retire: bool, timeout_s: float, flush: bool = False, only_new: bool = False
    ) -> None:
        """End the shard. Twice is fine. ShardUnavailable: it has not ended in time.

        With `retire` its arena and files go too; with `only_new`, only if it has made the arena.
        With `flush` blocks that are only in memory are written to disk before, for the time that
        the NVMe tier's settings allow, which `timeout_s` does not include; `status` shows the
        progress.
        """
        if flush and self._settings.nvme is not None:
            timeout_s += self._settings.nvme.flush_s
        self._retire, self._only_new = retire, only_new
        if self._loop.is_alive():
            self._flushes = flush
            self._loop.post(self._stopping.set)
            if not self._loop.join(timeout_s):
                raise ShardUnavailable(f"{self.name} did not end within {timeout_s:.0f} s.")
        if self._removes_files:
            sweep(self._settings.directory)

    @property
    def _removes_files(self) -> bool:
        return self._retire and (self._is_new or not self._only_new)

    @property
    def is_starting(self) -> bool:
        """Whether it does not serve yet; adopting an arena may take long."""
        return self._state["state"] in ("starting", "preparing")

    def status(self) -> dict[str, Any]:
        """Return state, and while it serves the figures of its parts."""
        uptime_s = round(time.monotonic() - self._began_at, 1)
        directory = str(self._settings.directory)
        status = {"shard": self.name, "directory": directory, "uptime_s": uptime_s}
        serving, state = self._serving, self._state
        if serving is not None and state["state"] == "serving":
            with contextlib.suppress(ShardUnavailable):  # its arena was closed meanwhile
                return {**status, **state, **serving.status()}
        return {**status, **self._state}

    def clear(self, timeout_s: float) -> int:
        """Evict every block that nobody leases, on disk too; return how many.

        A block that is in both tiers counts twice.
        """
        serving = self._require_serving()
        cleared = self._loop.call(serving.owner.clear, timeout_s)
        nvme = serving.nvme
        return cleared + (0 if nvme is None else nvme.clear(timeout_s))

    def _require_serving(self) -> Serving:
        if self._serving is None or self._state["state"] != "serving":
            raise ShardUnavailable(f"{self.name} is {self._state['state']}; see `kvray status`.")
        return self._serving

    async def _main(self) -> None:
        """Own the arena and serve until told to stop; always close what was opened."""
        directory = self._settings.directory
        check_path(directory / SOCKET_FILE)  # before minutes are spent on the arena
        if self._settings.tenant_secret_file is not None:
            self._parts.tenants = TenantSalts.read(self._settings.tenant_secret_file)
        access, mode = Access.of(self._settings.arena.group), 0o700
        while not self._stopping.is_set():
            wait_s = 0.0
            try:
                with contextlib.suppress(OSError):
                    mode = stat.S_IMODE(directory.parent.stat().st_mode)
                await self._own_and_serve(access)
            except (CapacityError, ConfigError, ShardUnavailable) as error:
                if self._state["state"] == "serving" or self._stopping.is_set():
                    raise
                # It may come: a mount, memory that others still hold, the end of another owner.
                if self._lost:
                    wait_s = _LOST_RETRY_S
                    self._wait_for(f"{self._lost} {error}")
                    with contextlib.suppress(OSError):
                        directory.parent.mkdir(mode)
                else:
                    wait_s = _FAILED_RETRY_S
                    self._fail(error)
            await pause(self._stopping, wait_s)

    async def _own_and_serve(self, access: Access) -> None:
        """Own the arena and serve until told to stop, or until the arena's files were removed."""
        claim = Claim(self._settings.directory, self.name, access)
        while not claim.attempt():
            await pause(self._stopping, _RETRY_S)
            if self._stopping.is_set():
                return
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(claim.release)
            stack.callback(self._tidy, claim)
            settings = self._settings
            arena = await asyncio.get_running_loop().run_in_executor(
                None, open_arena, settings.directory, settings.spec, self.name, self._preparing
            )
            stack.callback(arena.close)
            self._is_new = arena.tables.counts.shard_epoch == 0
            let_in(settings.directory, arena.arena_id, access)
            owner = ArenaOwner(arena, settings.quotas)
            populator = Populator(arena.tables)
            stack.callback(populator.stop)
            epoch = await self._adopt(owner)
            if epoch is not None:
                await self._serve(owner, epoch, claim, access, stack)

    async def _serve(
        self,
        owner: ArenaOwner,
        epoch: int,
        claim: Claim,
        access: Access,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Serve with an adopted arena; everything that this opens goes on the stack."""
        settings = self._settings
        serving = Serving(self._parts, owner, epoch=epoch)
        stack.push_async_callback(serving.close)
        if serving.disk is not None:
            await serving.disk.open(self._stopping, is_restart=self._is_restart)
        server = EngineServer(
            settings.directory / SOCKET_FILE,
            EngineRequests(self._parts).handlers(),
            self._parts.replicas.disconnect,
            access,
        )
        stack.push_async_callback(server.close)
        await server.start()
        self._serving, self._state, self._lost = serving, {"state": "serving"}, ""
        arena_path = settings.directory / ARENA_FILE
        mapped = arena_path.stat()

        async def is_there() -> bool:
            self._lost = _what_is_lost(owner.arena, arena_path, mapped)
            if not self._lost and not claim.renew():
                self._lost = f"{settings.directory} has another owner now."
            if not self._lost:
                await server.keep_bound()
            return not self._lost

        await serving.run(self._stopping, is_there)
        if self._stopping.is_set():
            if self._flushes and (nvme := serving.nvme) is not None:
                await nvme.flush(self._flushing)
            return
        _log.error("%s: %s It makes a new arena; engines follow.", self.name, self._lost)
        self._serving = None
        self._wait_for(self._lost)
        with contextlib.suppress(OSError):  # some of its files are gone
            owner.retire()

    async def _adopt(self, owner: ArenaOwner) -> int | None:
        """Adopt the arena, however long its lock is kept; return the epoch, None at a stop."""
        while not self._stopping.is_set():
            try:
                return owner.adopt()
            except ShardUnavailable as error:
                _log.warning("%s: waits to take the arena over: %s", self.name, error)
                self._wait_for(str(error))
                await pause(self._stopping, _RETRY_S)
        return None

    def _wait_for(self, message: str) -> None:
        self._state = {"state": "starting", "done": 0, "total": 0, "message": message}

    def _preparing(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise ShardUnavailable(f"{self.name} was stopped while it prepared its arena.")
        self._state = {"state": "preparing", "done": done, "total": total}

    def _flushing(self, done: int, total: int) -> None:
        self._state = {"state": "flushing", "done": done, "total": total}

    def _tidy(self, claim: Claim) -> None:
        """Remove the files in the directory if its arena goes or never existed."""
        directory = self._settings.directory
        if self._removes_files or not (directory / ARENA_FILE).exists():
            with contextlib.suppress(ConfigError):
                if claim.renew():  # else it is somebody else's
                    remove_files(directory)

    def _ended(self, error: Exception | None) -> None:
        """Note why the thread ends; if the shard has served, a new one must follow."""
        if error is None or (self._stopping.is_set() and isinstance(error, KVRayError)):
            self._state = {"state": "stopped"}
            return
        was_ready = self._state["state"] == "serving" or bool(self._lost)
        self._fail(error)
        if was_ready:  # else it would just fail again
            self._crashed()

    def _fail(self, error: Exception) -> None:
        message = str(error)
        self._state = {"state": "failed", "error": type(error).__name__, "message": message}
        if isinstance(error, KVRayError):
            _log.error("%s failed: %s", self.name, message)
        else:
            _log.error("%s ended by a defect", self.name, exc_info=error)


def _what_is_lost(arena: Arena, path: Path, mapped: os.stat_result) -> str:
    """Return which file of a served arena can no longer be opened, in a sentence; empty: none.

    `mapped` says what the file at `path` was when the arena was mapped.
    """
    try:
        if not os.path.samestat(mapped, path.stat()):
            return f"{path} is another file than the arena that was served."
        if arena.side_file.is_current():
            return ""
        return f"{arena.side_file.path}, the arena's lock file, was replaced or removed."
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} was removed."
