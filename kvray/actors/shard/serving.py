"""A shard that serves: the parts over its arena, and what they do again and again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.shard.adoption import StoppedHolder
from kvray.actors.shard.announcer import Announcer
from kvray.actors.shard.events.publisher import EventPublisher
from kvray.actors.shard.loop_thread import LoopThread, pause
from kvray.actors.shard.nvme_disk import NvmeDisk
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.shard.sending import Copies, Drain, Sender
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.traffic import RequestLog, Traffic
from kvray.actors.staging.peers import Ask, Peers
from kvray.actors.staging.replica_stager import ReplicaStager
from kvray.actors.staging.replicas import Reader, Replicas
from kvray.actors.staging.stager import Stager
from kvray.errors import CapacityError, ConfigError
from kvray.identity.tenant import TenantSalts
from kvray.store import ArenaOwner
from kvray.store.arena import holders, lease
from kvray.store.arena.mapped import is_damage
from kvray.store.retention import Retention

_log = logging.getLogger("kvray.shard")

_AUDIT_SHARE, _FIRST_AUDIT_SHARE = 0.001, 0.02
"""Of a core, for looks at the tables, and for those at tables that nobody has looked at yet or that
were just wrong."""
_QUIET_AFTER_S, _QUIET_PAUSES = 1.0, 4
_ROWS_RETRY_S = 60.0
_MENDED_S, _MENDS_MAX = 10.0, 5
"""An error that comes back so often, however the tables are mended, is a defect."""


@dataclass(slots=True, kw_only=True)
class ShardParts:
    """The parts that a shard has from its start to its end, whether or not it serves."""

    name: str
    settings: ShardSettings
    loop: LoopThread
    announcer: Announcer
    ask: Ask  # calls lookup, mover and other shards, from the event loop
    serving: "Callable[[], Serving]"
    """Returns the other parts; raises while the shard does not serve."""
    replicas: Replicas = field(default_factory=Replicas)
    request_log: RequestLog = field(default_factory=RequestLog)
    tenants: TenantSalts | None = None
    traffic: Traffic

    def first_reader(self, replica: str) -> tuple[int, Reader]:
        """Return the lowest rank of `replica` that is connected, and how it reads."""
        ranks = [rank for name, rank in self.replicas.connected() if name == replica]
        readers = self.replicas.readers(replica, ranks)
        if not readers:
            raise ConfigError(
                f"No rank of {replica!r:.80} has registered with {self.name}; ask at a node where"
                " it runs."
            )
        return min(readers.items())


class Serving:
    """The parts of a shard from the adoption of its arena to its end; used by its event loop."""

    def __init__(self, parts: ShardParts, owner: ArenaOwner, *, epoch: int) -> None:
        """Serve the arena of `owner`, adopted as `epoch`, until `close`."""
        settings, announcer = parts.settings, parts.announcer
        self.owner = owner
        self.epoch = epoch
        self._parts = parts
        self._name = parts.name
        self._peers = Peers(parts.name, parts.ask, call_timeout_s=settings.staging.call_timeout_s)
        self._stopped = StoppedHolder(parts.name, limit_s=settings.arena.stopped_s)
        self._long_leases: set[int] = set()
        """Holders with long leases that were named already."""
        self._round: asyncio.Future[None] | None = None
        self._round_at = (-1, -1)
        """The arena's tick and count of changes when the last round began."""
        self._auditing: asyncio.Future[dict[str, int]] | None = None
        self._audit_at = 0.0
        self._quiet_at = 0.0
        """From then on nothing has happened in the arena for a while."""
        self._heartbeat_at = 0.0
        self._mended_at: list[float] = []
        self._rows_at = 0.0
        self.retention = Retention(owner.arena, settings.arena.policy, settings.admission)
        self.disk: NvmeDisk | None = None  # None: the node is to keep nothing on disk
        if settings.nvme is not None:
            self.disk = NvmeDisk(
                owner.arena, self.retention, settings.nvme, owner.history, shard=parts.name
            )
        stager = Stager(
            owner.arena,
            self._peers,
            settings.staging,
            num_shards=lambda: announcer.num_shards,
            num_partitions=settings.lookup_partitions,
            nvme=lambda: None if self.nvme is None else self.nvme.reads,
        )
        self.stager = ReplicaStager(
            owner.arena, stager, parts.replicas, self._peers, settings.staging
        )
        self.sender = Sender(
            parts.name,
            owner,
            self.retention,
            self._peers,
            lambda: self.nvme,
            num_partitions=settings.lookup_partitions,
        )
        self.drain = Drain(self.sender)
        self.copies = Copies(self.sender, settings.copies)
        self.events: EventPublisher | None = None  # None: nobody is to hear of its blocks
        if settings.events is not None:
            self.events = EventPublisher(
                settings.directory,
                settings.events,
                owner,
                lambda: None if self.nvme is None else self.nvme.store,
                parts.replicas,
            )
            self.events.start()

    async def close(self) -> None:
        """End staging, then eviction and events, then the disk. Twice is fine."""
        try:
            await self.drain.close()
            await self.copies.close()
            await self.stager.close()
        finally:
            if self.events is not None:
                await asyncio.get_running_loop().run_in_executor(None, self.events.close)
            if self._round is not None:
                await asyncio.wait([self._round])
            if self.disk is not None:
                await self.disk.close()

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier below the arena, if there is one and its disk works now."""
        return None if self.disk is None else self.disk.tier

    def has_more(self) -> bool:
        """Return whether there may be blocks that are not in the arena but can be staged."""
        has_blocks = self.nvme is not None and self.nvme.may_have_blocks
        return self._parts.announcer.num_shards > 1 or has_blocks

    def status(self) -> dict[str, Any]:
        """Return the figures of every part; from any thread."""
        figures = {
            "arena": self.owner.arena.stats(),
            "removed_blocks": self.owner.history.counts(),
            "announcements": self._parts.announcer.status(),
            "replicas": self._parts.replicas.status(),
            "ended": self._parts.replicas.ended(),
            "namespaces": self._parts.replicas.namespaces(),
            "staging": self.stager.status(),
            "traffic": self._parts.traffic.status(),
            "copies": self.copies.status(),
        }
        if self.disk is not None:
            figures["nvme"] = self.disk.status()
        if self.events is not None:
            figures["events"] = self.events.status()
        if (drain := self.drain.status()) is not None:
            figures["drain"] = drain
        if (stopped := self._stopped.found) is not None:
            figures["stopped_with_lock"] = stopped
        return figures

    async def run(self, stopping: asyncio.Event, is_there: Callable[[], Awaitable[bool]]) -> None:
        """Do the shard's regular work until it has to stop or its arena no longer `is_there`."""
        while not stopping.is_set():
            now = time.monotonic()
            if now >= self._heartbeat_at and not await is_there():
                break
            try:
                self._tick(now)
            except Exception as error:
                # Damaged tables must not end the shard, because it is the one that repairs them.
                if not is_damage(error) or self._comes_back(now):
                    raise
                _log.error(
                    "%s: its tables make no sense and are derived again", self._name, exc_info=error
                )
                if not self.owner.mend():
                    _log.error("%s: %s", self._name, self.owner.arena.no_entry())
            await pause(stopping, self._pause_s(now))
        self._peers.close()
        if self._auditing is not None:
            await asyncio.wait([self._auditing])  # the arena is closed next

    def _tick(self, now: float) -> None:
        is_heartbeat = now >= self._heartbeat_at
        if is_heartbeat:
            self._heartbeat_at = now + self._parts.settings.shard.heartbeat_s
            self._stopped.look(self.owner.arena.side_file, now=now)
            self._parts.replicas.add_up()
        self._audit(now)
        self._begin_round(is_heartbeat=is_heartbeat)
        if self.disk is not None:
            self.disk.tick(now)
        self.stager.expire()
        self._parts.traffic.step(now)
        num_shards = self._parts.announcer.num_shards
        self._peers.tick(now, num_shards=num_shards)
        if not self.drain.is_on:
            self.copies.tick(now, num_shards=num_shards)
        self._announce()

    def _pause_s(self, now: float) -> float:
        """Return how long to do nothing: longer where nothing has happened for a while.

        A wake-up costs more than to see that there is nothing to do.
        """
        shard = self._parts.settings.shard
        if now <= self._quiet_at:
            return shard.announce_s
        return min(_QUIET_PAUSES * shard.announce_s, shard.heartbeat_s)

    def _begin_round(self, *, is_heartbeat: bool) -> None:
        """Look after the arena, unless nothing has happened in it; in a thread."""
        if self._round is not None:
            if not self._round.done():
                return
            ended, self._round = self._round, None
            ended.result()  # raises what the round raised
        tables = self.owner.arena.tables
        at = tables.counts.tick, tables.counts.changes
        if at != self._round_at:
            self._quiet_at = time.monotonic() + _QUIET_AFTER_S
        if at != self._round_at or is_heartbeat:
            self._round_at = at
            # In a thread, because it ranks all blocks.
            loop = asyncio.get_running_loop()
            self._round = loop.run_in_executor(None, self._look_after, is_heartbeat)

    def _look_after(self, is_heartbeat: bool) -> None:
        if is_heartbeat:
            self._bury_and_warn()
        self.retention.observe()
        self._add_rows()
        self.owner.evict_ahead(self._parts.settings.arena.free_target, self.retention.rank)

    def _add_rows(self) -> None:
        """Give the tables the rows that blocks of a smaller size need; a refusal is logged."""
        if time.monotonic() < self._rows_at:
            return
        try:
            if added := self.owner.add_rows():
                _log.info("%s: its tables have %d more rows, for smaller blocks", self._name, added)
        except CapacityError as error:
            self._rows_at = time.monotonic() + _ROWS_RETRY_S
            _log.warning("%s: %s", self._name, str(error))  # an error keeps the mapping

    def _audit(self, now: float) -> None:
        """Begin a look at a share of the tables, unless one is under way; in a thread."""
        ended = self._auditing
        if now >= self._audit_at and (ended is None or ended.done()):
            self._auditing = None
            for name, count in ended.result().items() if ended is not None else ():
                _log.error(
                    "%s: repaired %d corrupt %s in the arena's tables; run a memory test on this"
                    " node",
                    *(self._name, count, name),
                )
            loop = asyncio.get_running_loop()
            self._auditing = loop.run_in_executor(None, self._timed_audit)

    def _timed_audit(self) -> dict[str, int]:
        began = time.thread_time()  # CPU: what waits for a core, or the lock, costs none
        wrong: dict[str, int] | None = None
        try:
            wrong = self.owner.audit()
            return wrong
        finally:
            is_valid = self.owner.is_audited and wrong == {}
            share = _AUDIT_SHARE if is_valid else _FIRST_AUDIT_SHARE
            pause_s = (time.thread_time() - began) / share
            if is_valid:
                pause_s = max(pause_s, self._parts.settings.shard.heartbeat_s)
            self._audit_at = time.monotonic() + pause_s

    def _comes_back(self, now: float) -> bool:
        """Note that something made no sense; True if it has so often that it is a defect."""
        self._mended_at = [at for at in self._mended_at if at > now - _MENDED_S] + [now]
        return len(self._mended_at) > _MENDS_MAX

    def _announce(self) -> None:
        """Note what has changed, for the lookup to ask."""
        announcer, replicas = self._parts.announcer, self._parts.replicas
        announcer.name(replicas.connected(), replicas.numbers(), is_leaving=self.drain.is_on)
        announcer.collect(self.owner, None if self.nvme is None else self.nvme.store)

    def _bury_and_warn(self) -> None:
        for label in self.owner.bury_dead(limbo_s=self._parts.settings.arena.limbo_s):
            _log.warning("%s: holder %s died; its leases ended", self._name, label)
        tables = self.owner.arena.tables
        before = time.monotonic() - self._parts.settings.arena.lease_warn_s
        long = dict(lease.long_leases(tables, before=before))
        for row in sorted(long.keys() - self._long_leases):
            label = holders.shown(tables.holder_label[row])
            _log.warning("%s: holder %s has leased %d slots for long", self._name, label, long[row])
        self._long_leases = set(long)
