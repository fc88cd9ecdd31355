"""The shard: owner of a node's arena; evicts ahead, announces, buries the dead, serves engines.

All state belongs to one event loop in one thread. The actor around it only hands calls over.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvray import __version__
from kvray.actors.adoption import open_arena
from kvray.actors.announcer import Announce, Announcer
from kvray.actors.async_calls import Ask, ask_nobody
from kvray.actors.claim import Claim
from kvray.actors.engine_requests import EngineRequests
from kvray.actors.engine_server import EngineServer, check_path
from kvray.actors.inquiries import Asked, Inquiries
from kvray.actors.introductions import Introductions
from kvray.actors.keeper import Keeper
from kvray.actors.long_leases import LongLeases
from kvray.actors.nvme_tier import NvmeSettings, NvmeTier
from kvray.actors.orders import FetchOrder
from kvray.actors.ownership import let_in, remove_files, sweep
from kvray.actors.peers import Peers
from kvray.actors.prompt_keys import prompt_keys
from kvray.actors.replica_stager import ReplicaStager
from kvray.actors.replicas import Replicas
from kvray.actors.stager import Stager, StagingSettings
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.store.access import Access
from kvray.store.arena import ARENA_FILE
from kvray.store.prefault import Populator
from kvray.tenant import TenantSalts
from kvray.wire import SOCKET_FILE

_log = logging.getLogger("kvray.shard")

T = TypeVar("T")

_RETRY_S = 0.1
_LAST_SEND_S = 3.0
_ANSWER_S = 2.0
"""How long the event loop may take to get to a call."""


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
    staging: StagingSettings = field(default_factory=StagingSettings)
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the blocks of namespaces may take of the arena, see `quotas.set_quotas`."""
    policy: str = "gittins"
    """What decides which blocks go first: see `kvray.store.policy`."""
    admission: str = "likely"
    """What decides which blocks that leave the arena are kept on disk."""
    nvme: NvmeSettings | None = None
    """None: the node keeps nothing on disk."""
    group: str | None = None
    """Whose members may open arena and socket too; see `Access`."""
    tenant_secret_file: Path | None = None
    """Has what the salts of prompts that are prefetched are derived with; None: no tenants."""


class Shard:
    """One node's shard; `start` it, then ask. Thread-safe."""

    def __init__(
        self,
        name: str,
        settings: ShardSettings,
        announce: Announce,
        crashed: Callable[[], None] = lambda: None,
        *,
        ask: Ask = ask_nobody,
    ) -> None:
        """Own the arena of `settings.directory`.

        Args:
            name: the shard's name, everywhere.
            settings: see there.
            announce: brings announcements to the lookup.
            crashed: called when the shard ends by a defect of its own, after it was logged.
            ask: calls lookup, mover and other shards, from the shard's event loop.
        """
        self.name = name
        self._crashed = crashed
        self._settings = settings
        self._announcer = Announcer(name, announce)
        self._replicas = Replicas()
        self._ask = ask
        self._peers = Peers(name, ask, call_timeout_s=settings.staging.call_timeout_s)
        self._owner: ArenaOwner | None = None
        self._stager: ReplicaStager | None = None
        self._keeper: Keeper | None = None
        self._tenants: TenantSalts | None = None
        self.inquiries = Inquiries(
            self._replicas,
            self._announcer.desk,
            self._serving,
            nvme=self._nvme,
            uses=lambda: self._keeping().uses,
            tenants=lambda: self._tenants,
        )
        """What people ask."""
        self._epoch = 0
        self._state: dict[str, Any] = {"state": "starting", "done": 0, "total": 0}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._retire = self._flushes = False
        self._long_leases = LongLeases(after_s=settings.lease_warn_s)
        self._thread = threading.Thread(target=self._run, name="kvray-shard", daemon=True)

    def start(self) -> None:
        """Prepare the arena in the background; `status` tells how far it is."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def refuse(self, error: KVRayError) -> None:
        """Stay without an arena, in place of `start`; `status` says why."""
        self._end(error)

    def stop(self, *, retire: bool, timeout_s: float, flush: bool = False) -> None:
        """End the shard. Twice is fine.

        Args:
            retire: whether its arena and files go too.
            timeout_s: how long it may take, beside the flush.
            flush: whether what is not on disk is written there before, for as long as the
                settings of the NVMe tier say; `status` tells how far that is.

        Raises:
            ShardUnavailable: it has not ended in time.
        """
        if flush and self._settings.nvme is not None:
            timeout_s += self._settings.nvme.flush_s
        if self._thread.is_alive():
            self._retire, self._flushes = retire, flush
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._require_loop().call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise ShardUnavailable(f"{self.name} did not end within {timeout_s:.0f} s.")
        if retire:
            sweep(self._settings.directory)

    def status(self) -> dict[str, Any]:
        """Return state, arena figures and replicas."""
        status = {"shard": self.name, "directory": str(self._settings.directory), **self._state}
        if self._owner is not None and self._state["state"] == "serving":
            status["arena"] = self._owner.arena.stats()
            status["departed"] = self._owner.departures.counts()
            if self._keeper is not None:
                status["spare_blocks"] = self._keeper.num_spare
            status["announcements"] = self._announcer.status()
            status["replicas"] = self._replicas.status()
            status["namespaces"] = self._replicas.namespaces()
            if self._stager is not None:
                status["staging"] = self._stager.status()
            if (nvme := self._nvme()) is not None:
                status["nvme"] = nvme.status()
        return status

    def asked(self, *, replica: str | None, request_id: int | None, last: int) -> list[Asked]:
        """Return what is known of requests; arguments as for `RequestLog.find`.

        Raises:
            ShardUnavailable: the shard does not answer.
        """
        find = self.inquiries.requests.find
        found = self._on_loop(
            lambda: find(replica=replica, request_id=request_id, last=last), _ANSWER_S
        )
        return self.inquiries.asked(found)

    def clear(self, timeout_s: float) -> int:
        """Let go of every block that nobody leases, on disk too; return how many.

        A block that is in both tiers counts twice.

        Raises:
            ShardUnavailable: the shard is not serving, or does not answer within `timeout_s`.
            TierError: the disk failed.
        """
        self._serving()
        cleared = self._on_loop(lambda: self._serving().clear(), timeout_s)
        nvme = self._nvme()
        return cleared + (nvme.clear() if nvme is not None else 0)

    def prefetch(
        self,
        replica: str,
        tokens: bytes,
        *,
        salt: str | int | None = None,
        lora: str | None = None,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> dict[str, Any]:
        """Bring a prompt's blocks here for a replica before its engine sees the request.

        Args:
            replica: one with a rank that has registered here.
            tokens: see `prompt_keys`, as for the rest.
            salt: see there.
            lora: see there.
            media: see there.

        Returns:
            num_tokens and num_blocks that are here now, leading and for all ranks; staged_tokens
            that were not here before; reason why it is not more.

        Raises:
            ConfigError: a value cannot be used, or no rank of `replica` has registered here.
            ShardUnavailable: the shard is not serving, or does not answer in time.
        """
        first = self._replicas.first_reader(replica)
        if first is None:
            raise ConfigError(
                f"No rank of {replica!r:.80} has registered with {self.name}; prefetch at a node"
                " where it runs."
            )
        rank, reader = first
        keys = prompt_keys(reader, tokens, salt=salt, lora=lora, media=media, tenants=self._tenants)
        if not keys:
            return {"num_tokens": 0, "staged_tokens": 0, "num_blocks": 0, "reason": "none"}
        found = self._await_on_loop(
            self._staging().prefetch(replica, rank, b"".join(keys)),
            self._settings.staging.deadline_s,
        )
        return {
            "num_tokens": found["num_blocks"] * reader.tokens_per_block,
            "staged_tokens": found["num_staged"] * reader.tokens_per_block,
            "num_blocks": found["num_blocks"],
            "reason": found["reason"],
        }

    def promote(self, order: FetchOrder) -> int:
        """Bring blocks from this node's disk into its memory, for a shard that is to have them.

        Nothing is waited for but the disk.

        Returns:
            How many blocks came.

        Raises:
            ShardUnavailable: the shard is not serving, or does not answer in time.
        """
        self._serving()
        nvme = self._nvme()
        if nvme is None:
            return 0
        report = self._await_on_loop(nvme.promote(order), order.deadline_s)
        return sum(source.num_blocks for source in report.sources.values())

    def stage(self, replica: str, rank: int, keys: bytes, wait_s: float) -> dict[str, Any]:
        """See `ReplicaStager.stage_here`, for one rank."""
        return self.stage_ranks(replica, [rank], wait_s, 0.0, None, keys)

    def stage_ranks(
        self,
        replica: str,
        ranks: Sequence[int],
        wait_s: float,
        tokens_per_s: float,
        verify_from: int | None,
        *keys: bytes,
    ) -> dict[str, Any]:
        """See `ReplicaStager.stage_here`."""
        staging = self._staging()
        answer = staging.stage_here(replica, ranks, wait_s, tokens_per_s, verify_from, *keys)
        return self._await_on_loop(answer, wait_s)

    def lease_ranks(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """See `ReplicaStager.lease_here`."""
        staging = self._staging()
        return self._on_loop(lambda: staging.lease_here(replica, ranks, token, *keys), _ANSWER_S)

    def release_ranks(self, token: str) -> None:
        """See `ReplicaStager.release_here`."""
        staging = self._staging()
        self._on_loop(lambda: staging.release_here(token), _ANSWER_S)

    def _await_on_loop(self, answer: Coroutine[Any, Any, T], work_s: float) -> T:
        """Return what `answer` returns on the loop, which may work on it for so long."""
        timeout_s = work_s + _ANSWER_S
        future = None
        try:
            future = asyncio.run_coroutine_threadsafe(answer, self._require_loop())
            return future.result(timeout_s)
        except (RuntimeError, FutureTimeoutError, CancelledError):
            if future is None:
                answer.close()  # the loop has ended; nobody else will
            else:
                future.cancel()
            raise ShardUnavailable(
                f"{self.name} did not answer within {timeout_s:.0f} s; see `kvray status`."
            ) from None

    def _staging(self) -> ReplicaStager:
        self._serving()
        assert self._stager is not None, "whoever serves has one"
        return self._stager

    def _on_loop(self, function: Callable[[], T], timeout_s: float) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except KVRayError as error:
                answer.set_exception(error)

        try:
            self._require_loop().call_soon_threadsafe(run)
            return answer.result(timeout_s)
        except (RuntimeError, FutureTimeoutError):
            raise ShardUnavailable(
                f"{self.name} did not answer within {timeout_s:.0f} s; see `kvray status`."
            ) from None

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ShardUnavailable(f"{self.name} was not started.")
        return self._loop

    def _serving(self) -> ArenaOwner:
        if self._owner is None or self._state["state"] != "serving":
            raise ShardUnavailable(f"{self.name} is {self._state['state']}; see `kvray status`.")
        return self._owner

    def _run(self) -> None:
        loop = self._require_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._main())
            self._state = {"state": "stopped"}
        except Exception as error:  # noqa: BLE001 - the thread's end; it is logged and acted upon
            self._end(error)
        finally:
            loop.close()

    def _end(self, error: Exception) -> None:
        """Note why the thread ends; after it has served, a new shard is to follow."""
        if self._stopping.is_set() and isinstance(error, KVRayError):
            self._state = {"state": "stopped"}
            return
        was_ready = self._state["state"] == "serving"
        message = str(error)
        self._state = {"state": "failed", "error": type(error).__name__, "message": message}
        if isinstance(error, KVRayError):
            _log.error("%s failed: %s", self.name, message)
        else:
            _log.exception("%s ended by a defect", self.name)
        if was_ready:  # else it would just fail again
            self._crashed()

    async def _main(self) -> None:
        directory = self._settings.directory
        check_path(directory / SOCKET_FILE)  # before minutes are spent on the arena
        if self._settings.tenant_secret_file is not None:
            self._tenants = TenantSalts.read(self._settings.tenant_secret_file)
        access = Access.of(self._settings.group)
        claim = Claim(directory, self.name, access)
        if not await self._become_owner(claim):
            return
        requests = EngineRequests(
            self._replicas,
            self._announcer.desk,
            self._identity,
            self._staging,
            self._has_more,
            self.inquiries.requests,
        )
        server = EngineServer(
            directory / SOCKET_FILE, requests.handlers(), self._replicas.disconnect, access
        )
        arena = populator = None
        try:
            arena = await self._require_loop().run_in_executor(None, self._open_arena)
            let_in(directory, arena.arena_id, access)
            owner = ArenaOwner(arena, self._settings.quotas)
            populator = Populator(arena.tables)
            if await self._adopt(owner):
                self._keeper = await self._make_keeper(owner)
                self._stager = self._make_stager(arena)
                await server.start()
                self._owner, self._state = owner, {"state": "serving"}
                await self._serve(owner)
                if self._flushes:
                    await self._keeper.flush(self._flushing)
        finally:
            await server.close()
            if self._stager is not None:
                await self._stager.close()
            if self._keeper is not None:
                await self._keeper.close()
            if populator is not None:
                populator.stop()
            if arena is not None:
                arena.close()
            if self._retire or not (directory / ARENA_FILE).exists():
                remove_files(directory)
            claim.release()

    async def _make_keeper(self, owner: ArenaOwner) -> Keeper:
        settings = self._settings
        keeper = Keeper(
            owner,
            free_target=settings.free_target,
            policy=settings.policy,
            admission=settings.admission,
            shard=self.name,
            ask=self._ask,
            num_shards=lambda: self._announcer.num_shards,
        )
        if settings.nvme is not None:
            await keeper.open_nvme(settings.nvme, self._stopping)
        return keeper

    def _keeping(self) -> Keeper:
        self._serving()
        assert self._keeper is not None, "whoever serves has one"
        return self._keeper

    def _nvme(self) -> NvmeTier | None:
        return None if self._keeper is None else self._keeper.nvme

    def _make_stager(self, arena: Arena) -> ReplicaStager:
        settings = self._settings.staging
        stager = Stager(
            arena,
            self._peers,
            settings,
            num_shards=lambda: self._announcer.num_shards,
            nvme=self._nvme(),
        )
        return ReplicaStager(arena, stager, self._replicas, self._peers, settings)

    def _has_more(self) -> bool:
        """Whether there may be blocks that are not in the arena but can be staged."""
        nvme = self._nvme()
        return self._announcer.num_shards > 1 or (nvme is not None and nvme.may_have_blocks)

    def _flushing(self, done: int, total: int) -> None:
        self._state = {"state": "flushing", "done": done, "total": total}

    async def _become_owner(self, claim: Claim) -> bool:
        """Wait until the directory is ours; False if the shard is to stop before."""
        while not self._stopping.is_set():
            if claim.attempt():
                return True
            await self._pause(_RETRY_S)
        return False

    async def _adopt(self, owner: ArenaOwner) -> bool:
        """Take the arena over, however long some process keeps its lock; False if stopped."""
        while not self._stopping.is_set():
            try:
                self._epoch = owner.adopt()
            except ShardUnavailable as error:
                _log.warning("%s: waits to take the arena over: %s", self.name, error)
                self._state = {"state": "starting", "done": 0, "total": 0, "message": str(error)}
                await self._pause(_RETRY_S)
            else:
                return True
        return False

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until the shard is to stop."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _open_arena(self) -> Arena:
        settings = self._settings
        return open_arena(
            settings.directory, settings.spec, shard=self.name, progress=self._progress
        )

    def _progress(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise ShardUnavailable(f"{self.name} was stopped while it prepared its arena.")
        self._state = {"state": "preparing", "done": done, "total": total}

    def _identity(self) -> dict[str, Any]:
        arena = self._serving().arena
        return {
            "shard": self.name,
            "arena_id": arena.arena_id,
            "shard_epoch": self._epoch,
            "version": __version__,
            "monotonic_s": time.monotonic(),
        }

    async def _serve(self, owner: ArenaOwner) -> None:
        """Do the shard's regular work until told to stop."""
        settings, loop = self._settings, self._require_loop()
        assert self._keeper is not None, "whoever serves has one"
        heartbeat_at = 0.0
        is_due = False
        sending: asyncio.Future[None] | None = None
        introductions = Introductions(self._peers)
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= heartbeat_at:
                heartbeat_at, is_due = now + settings.heartbeat_s, True
                self._bury_and_warn(owner)
            self._keeper.tick(now)
            self._staging().expire()
            introductions.tick(now, num_shards=self._announcer.num_shards)
            self._announcer.name_ranks(self._replicas.connected())
            # A lookup that does not answer keeps the shard from announcing, but from nothing else.
            if sending is None or sending.done():
                if sending is not None:
                    sending.result()
                    sending = None
                if self._announcer.collect(owner, self._keeper.store) or is_due:
                    sending = loop.run_in_executor(None, self._announcer.send, self._epoch)
                    is_due = False
            await self._pause(settings.announce_s)
        introductions.close()
        if sending is not None:
            await asyncio.wait([sending], timeout=_LAST_SEND_S)

    def _bury_and_warn(self, owner: ArenaOwner) -> None:
        for label in owner.bury_dead(limbo_s=self._settings.limbo_s):
            _log.warning("%s: holder %s died; its leases ended", self.name, label)
        for label, num_slots in self._long_leases.newly(owner.arena, now=time.monotonic()):
            _log.warning("%s: holder %s has leased %d slots for long", self.name, label, num_slots)
