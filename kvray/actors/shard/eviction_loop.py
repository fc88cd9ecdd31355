"""Evicts a node's blocks ahead of need, and decides which of them go to disk."""

import asyncio

from kvray.actors.shard.nvme_disk import NvmeDisk
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.shard.settings import ShardSettings
from kvray.store import ArenaOwner
from kvray.store.retention import Retention


class EvictionLoop:
    """Decides what stays in a shard's tiers; used by its event loop."""

    def __init__(self, owner: ArenaOwner, settings: ShardSettings, *, shard: str) -> None:
        self._owner = owner
        self._free_target = settings.arena.free_target
        self.retention = Retention(owner.arena, settings.arena.policy, settings.admission)
        self._round: asyncio.Future[None] | None = None
        self.disk: NvmeDisk | None = None
        """None: the node is to keep nothing on disk."""
        if settings.nvme is not None:
            self.disk = NvmeDisk(
                owner.arena, self.retention, settings.nvme, owner.history, shard=shard
            )

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier below the arena, if there is one and its disk works now."""
        return None if self.disk is None else self.disk.tier

    def tick(self, now: float) -> None:
        """Start the next round when the last one is over; called often. Raises what that raised."""
        if self._round is None or self._round.done():
            ended, self._round = self._round, None
            if ended is not None:
                ended.result()
            # In a thread, because it ranks all blocks.
            self._round = asyncio.get_running_loop().run_in_executor(None, self._keep)
        if self.disk is not None:
            self.disk.tick(now)

    async def close(self) -> None:
        """End the current round. Twice is fine."""
        if self._round is not None:
            await asyncio.wait([self._round])
        if self.disk is not None:
            await self.disk.close()

    def _keep(self) -> None:
        self.retention.observe()
        self._owner.evict_ahead(self._free_target, self.retention.rank)
