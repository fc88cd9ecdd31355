"""The shard: owner of a node's arena; evicts ahead, announces, buries the dead, serves engines.

All state belongs to one event loop in one thread. The actor around it only hands calls over.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvray.actors.adoption import open_arena
from kvray.actors.announcer import Announce, Announcer
from kvray.actors.async_calls import Ask, ask_nobody
from kvray.actors.claim import Claim
from kvray.actors.engine_requests import EngineRequests
from kvray.actors.engine_server import EngineServer, check_path
from kvray.actors.inquiries import Asked, Inquiries
from kvray.actors.keeper import Keeper
from kvray.actors.loop_thread import LoopThread, pause
from kvray.actors.orders import FetchOrder
from kvray.actors.ownership import let_in, remove_files, sweep
from kvray.actors.peers import Peers
from kvray.actors.prompt_keys import prompt_keys
from kvray.actors.replica_stager import ReplicaStager
from kvray.actors.replicas import Replicas
from kvray.actors.serving import Serving
from kvray.actors.shard_settings import ShardSettings
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.store import Arena, ArenaOwner
from kvray.store.access import Access
from kvray.store.arena import ARENA_FILE
from kvray.store.prefault import Populator
from kvray.tenant import TenantSalts
from kvray.wire import SOCKET_FILE

_log = logging.getLogger("kvray.shard")

_RETRY_S = 0.1
_ANSWER_S = 2.0
"""How long the event loop may take to get to a call."""


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
        self._serving: Serving | None = None
        self._tenants: TenantSalts | None = None
        self.inquiries = Inquiries(
            self._replicas,
            self._announcer.desk,
            self._require_serving,
            tenants=lambda: self._tenants,
        )
        """What people ask."""
        self._state: dict[str, Any] = {"state": "starting", "done": 0, "total": 0}
        self._stopping = asyncio.Event()
        self._retire = self._flushes = False
        self._loop = LoopThread(name, self._main, self._ended)

    def start(self) -> None:
        """Prepare the arena in the background; `status` tells how far it is."""
        self._loop.start()

    def refuse(self, error: KVRayError) -> None:
        """Stay without an arena, in place of `start`; `status` says why."""
        self._ended(error)

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
        if self._loop.is_alive():
            self._retire, self._flushes = retire, flush
            self._loop.post(self._stopping.set)
            if not self._loop.join(timeout_s):
                raise ShardUnavailable(f"{self.name} did not end within {timeout_s:.0f} s.")
        if retire:
            sweep(self._settings.directory)

    def status(self) -> dict[str, Any]:
        """Return state, and while it serves the figures of its parts."""
        status = {"shard": self.name, "directory": str(self._settings.directory), **self._state}
        if self._serving is not None and self._state["state"] == "serving":
            status |= self._serving.status()
        return status

    def asked(self, *, replica: str | None, request_id: int | None, last: int) -> list[Asked]:
        """Return what is known of requests; arguments as for `RequestLog.find`.

        Raises:
            ShardUnavailable: the shard does not answer.
        """
        find = self.inquiries.requests.find
        found = self._loop.call(
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
        serving = self._require_serving()
        cleared = self._loop.call(serving.owner.clear, timeout_s)
        return cleared + (serving.nvme.clear() if serving.nvme is not None else 0)

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
        found = self._loop.wait(
            self._stager().prefetch(replica, rank, b"".join(keys)),
            self._settings.staging.deadline_s + _ANSWER_S,
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
        nvme = self._require_serving().nvme
        if nvme is None:
            return 0
        report = self._loop.wait(nvme.promote(order), order.deadline_s + _ANSWER_S)
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
        stage = self._stager().stage_here
        answer = stage(replica, ranks, wait_s, tokens_per_s, verify_from, *keys)
        return self._loop.wait(answer, wait_s + _ANSWER_S)

    def lease_ranks(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """See `ReplicaStager.lease_here`."""
        lease = self._stager().lease_here
        return self._loop.call(lambda: lease(replica, ranks, token, *keys), _ANSWER_S)

    def release_ranks(self, token: str) -> None:
        """See `ReplicaStager.release_here`."""
        release = self._stager().release_here
        self._loop.call(lambda: release(token), _ANSWER_S)

    def _stager(self) -> ReplicaStager:
        return self._require_serving().stager

    def _require_serving(self) -> Serving:
        if self._serving is None or self._state["state"] != "serving":
            raise ShardUnavailable(f"{self.name} is {self._state['state']}; see `kvray status`.")
        return self._serving

    async def _main(self) -> None:
        """Own the arena and serve until told to stop; what was opened is closed in any case."""
        directory = self._settings.directory
        check_path(directory / SOCKET_FILE)  # before minutes are spent on the arena
        if self._settings.tenant_secret_file is not None:
            self._tenants = TenantSalts.read(self._settings.tenant_secret_file)
        access = Access.of(self._settings.group)
        claim = Claim(directory, self.name, access)
        if not await self._become_owner(claim):
            return
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(claim.release)
            stack.callback(self._tidy)
            arena = await asyncio.get_running_loop().run_in_executor(None, self._open_arena)
            stack.callback(arena.close)
            let_in(directory, arena.arena_id, access)
            owner = ArenaOwner(arena, self._settings.quotas)
            populator = Populator(arena.tables)
            stack.callback(populator.stop)
            epoch = await self._adopt(owner)
            if epoch is not None:
                await self._serve(owner, epoch, access, stack)

    async def _serve(
        self, owner: ArenaOwner, epoch: int, access: Access, stack: contextlib.AsyncExitStack
    ) -> None:
        """Serve with an arena that was adopted; what is opened for that goes on the stack."""
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
        stack.push_async_callback(keeper.close)
        if settings.nvme is not None:
            await keeper.open_nvme(settings.nvme, self._stopping)
        serving = Serving(
            self.name,
            settings,
            owner,
            keeper,
            epoch=epoch,
            announcer=self._announcer,
            replicas=self._replicas,
            peers=Peers(self.name, self._ask, call_timeout_s=settings.staging.call_timeout_s),
        )
        stack.push_async_callback(serving.stager.close)
        server = self._make_server(access)
        stack.push_async_callback(server.close)
        await server.start()
        self._serving, self._state = serving, {"state": "serving"}
        await serving.run(self._stopping)
        if self._flushes:
            await keeper.flush(self._flushing)

    def _make_server(self, access: Access) -> EngineServer:
        requests = EngineRequests(
            self._replicas,
            self._announcer.desk,
            self._require_serving,
            self.inquiries.requests,
        )
        path = self._settings.directory / SOCKET_FILE
        return EngineServer(path, requests.handlers(), self._replicas.disconnect, access)

    async def _become_owner(self, claim: Claim) -> bool:
        """Wait until the directory is ours; False if the shard is to stop before."""
        while not self._stopping.is_set():
            if claim.attempt():
                return True
            await pause(self._stopping, _RETRY_S)
        return False

    async def _adopt(self, owner: ArenaOwner) -> int | None:
        """Take the arena over, however long some process keeps its lock.

        Returns:
            The epoch that begins; None if the shard is to stop before.
        """
        while not self._stopping.is_set():
            try:
                return owner.adopt()
            except ShardUnavailable as error:
                _log.warning("%s: waits to take the arena over: %s", self.name, error)
                self._state = {"state": "starting", "done": 0, "total": 0, "message": str(error)}
                await pause(self._stopping, _RETRY_S)
        return None

    def _open_arena(self) -> Arena:
        settings = self._settings
        return open_arena(
            settings.directory, settings.spec, shard=self.name, progress=self._preparing
        )

    def _preparing(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise ShardUnavailable(f"{self.name} was stopped while it prepared its arena.")
        self._state = {"state": "preparing", "done": done, "total": total}

    def _flushing(self, done: int, total: int) -> None:
        self._state = {"state": "flushing", "done": done, "total": total}

    def _tidy(self) -> None:
        """Remove what is left in the directory, if its arena goes or there never was one."""
        directory = self._settings.directory
        if self._retire or not (directory / ARENA_FILE).exists():
            remove_files(directory)

    def _ended(self, error: Exception | None) -> None:
        """Note why the thread ends; after it has served, a new shard is to follow."""
        if error is None or (self._stopping.is_set() and isinstance(error, KVRayError)):
            self._state = {"state": "stopped"}
            return
        was_ready = self._state["state"] == "serving"
        message = str(error)
        self._state = {"state": "failed", "error": type(error).__name__, "message": message}
        if isinstance(error, KVRayError):
            _log.error("%s failed: %s", self.name, message)
        else:
            _log.error("%s ended by a defect", self.name, exc_info=error)
        if was_ready:  # else it would just fail again
            self._crashed()
