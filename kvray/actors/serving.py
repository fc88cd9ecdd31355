"""A shard that serves: the parts over its arena, and what they do again and again."""

import asyncio
import logging
import time
from typing import Any

from kvray import __version__
from kvray.actors.announcer import Announcer
from kvray.actors.introductions import Introductions
from kvray.actors.keeper import Keeper
from kvray.actors.long_leases import LongLeases
from kvray.actors.loop_thread import pause
from kvray.actors.nvme_tier import NvmeTier
from kvray.actors.peers import Peers
from kvray.actors.replica_stager import ReplicaStager
from kvray.actors.replicas import Replicas
from kvray.actors.shard_settings import ShardSettings
from kvray.actors.stager import Stager
from kvray.store import ArenaOwner

_log = logging.getLogger("kvray.shard")

_LAST_SEND_S = 3.0


class Serving:
    """What a shard has from when its arena is its own until it ends; used by its event loop."""

    def __init__(
        self,
        name: str,
        settings: ShardSettings,
        owner: ArenaOwner,
        keeper: Keeper,
        *,
        epoch: int,
        announcer: Announcer,
        replicas: Replicas,
        peers: Peers,
    ) -> None:
        """Serve the arena of `owner`.

        Args:
            name: the shard's.
            settings: see there.
            owner: of the arena, which was adopted.
            keeper: of the same; whoever made it closes it.
            epoch: of that adoption.
            announcer: tells the lookup what comes and goes.
            replicas: of the shard's node.
            peers: the other shards.
        """
        self.owner = owner
        self.keeper = keeper
        self.epoch = epoch
        self._name = name
        self._settings = settings
        self._announcer = announcer
        self._replicas = replicas
        self._peers = peers
        self._long_leases = LongLeases(after_s=settings.lease_warn_s)
        self._sending: asyncio.Future[None] | None = None
        stager = Stager(
            owner.arena,
            peers,
            settings.staging,
            num_shards=lambda: announcer.num_shards,
            nvme=keeper.nvme,
        )
        self.stager = ReplicaStager(owner.arena, stager, replicas, peers, settings.staging)

    @property
    def nvme(self) -> NvmeTier | None:
        """The node's blocks on disk, if it has such a tier and its device works."""
        return self.keeper.nvme

    def has_more(self) -> bool:
        """Return whether there may be blocks that are not in the arena but can be staged."""
        on_disk = self.nvme is not None and self.nvme.may_have_blocks
        return self._announcer.num_shards > 1 or on_disk

    def identity(self) -> dict[str, Any]:
        """Return what engines are told of the shard, see `hello` in `EngineRequests`."""
        return {
            "shard": self._name,
            "arena_id": self.owner.arena.arena_id,
            "shard_epoch": self.epoch,
            "version": __version__,
            "monotonic_s": time.monotonic(),
        }

    def status(self) -> dict[str, Any]:
        """Return the figures of every part; from any thread."""
        figures = {
            "arena": self.owner.arena.stats(),
            "departed": self.owner.departures.counts(),
            "spare_blocks": self.keeper.num_spare,
            "announcements": self._announcer.status(),
            "replicas": self._replicas.status(),
            "namespaces": self._replicas.namespaces(),
            "staging": self.stager.status(),
        }
        if self.nvme is not None:
            figures["nvme"] = self.nvme.status()
        return figures

    async def run(self, stopping: asyncio.Event) -> None:
        """Do the shard's regular work until it is to stop."""
        heartbeat_at = 0.0
        is_due = False
        introductions = Introductions(self._peers)
        while not stopping.is_set():
            now = time.monotonic()
            if now >= heartbeat_at:
                heartbeat_at, is_due = now + self._settings.heartbeat_s, True
                self._bury_and_warn()
            self.keeper.tick(now)
            self.stager.expire()
            introductions.tick(now, num_shards=self._announcer.num_shards)
            if self._announce(is_due=is_due):
                is_due = False
            await pause(stopping, self._settings.announce_s)
        introductions.close()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=_LAST_SEND_S)

    def _announce(self, *, is_due: bool) -> bool:
        """Send what is new, or a sign of life if one is due; return whether anything was sent.

        A lookup that does not answer keeps the shard from announcing, but from nothing else.
        """
        self._announcer.name_ranks(self._replicas.connected())
        if self._sending is not None:
            if not self._sending.done():
                return False
            self._sending.result()
            self._sending = None
        if not self._announcer.collect(self.owner, self.keeper.store) and not is_due:
            return False
        loop = asyncio.get_running_loop()
        self._sending = loop.run_in_executor(None, self._announcer.send, self.epoch)
        return True

    def _bury_and_warn(self) -> None:
        for label in self.owner.bury_dead(limbo_s=self._settings.limbo_s):
            _log.warning("%s: holder %s died; its leases ended", self._name, label)
        newly = self._long_leases.newly(self.owner.arena, now=time.monotonic())
        for label, num_slots in newly:
            _log.warning("%s: holder %s has leased %d slots for long", self._name, label, num_slots)
