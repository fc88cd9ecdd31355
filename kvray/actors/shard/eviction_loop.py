"""Evicts a node's blocks ahead of need, and decides which of them go to disk."""

import asyncio
from collections.abc import Callable

import numpy as np

from kvray.actors.shard.duplicates import Duplicates
from kvray.actors.shard.nvme_disk import NvmeDisk
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.staging.ask import Ask
from kvray.store import ArenaOwner
from kvray.store.retention import Retention

_AHEAD_SHARE = 1 / 8
"""Share of an arena beyond the free target: below it the shard asks which blocks are duplicates."""


class EvictionLoop:
    """Decides what stays in a shard's tiers; used by its event loop."""

    def __init__(
        self,
        owner: ArenaOwner,
        settings: ShardSettings,
        *,
        shard: str,
        ask: Ask,
        num_shards: Callable[[], int],
    ) -> None:
        self._owner = owner
        self._free_target = settings.free_target
        self.retention = Retention(owner.arena, settings.policy, settings.admission)
        self._round: asyncio.Future[None] | None = None
        self._duplicates = Duplicates(self.retention, shard=shard, ask=ask, num_shards=num_shards)
        self._free_share = settings.free_target + _AHEAD_SHARE
        """Below this free share, blocks may soon be evicted or written to disk."""
        self.disk: NvmeDisk | None = None
        """None: the node is to keep nothing on disk."""
        if settings.nvme is not None:
            self.disk = NvmeDisk(
                owner.arena, self.retention, settings.nvme, owner.history, shard=shard
            )
            self._free_share = max(self._free_share, 1.0 - settings.nvme.high_watermark)

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier below the arena, if there is one and its disk works now."""
        return None if self.disk is None else self.disk.tier

    @property
    def num_duplicates(self) -> int:
        """Blocks of the arena that another shard is known to keep at the moment; any thread."""
        num_slots = self._owner.arena.tables.geometry.num_slots
        return int(np.count_nonzero(self.retention.are_duplicates(np.arange(num_slots))))

    def tick(self, now: float) -> None:
        """Start the next round when the last one is over; called often. Raises what that raised."""
        if self._round is None or self._round.done():
            ended, self._round = self._round, None
            if ended is not None:
                ended.result()
            # In a thread, because it ranks all blocks.
            self._round = asyncio.get_running_loop().run_in_executor(None, self._keep)
        self._duplicates.tick(now, free_share=self._free_share)
        if self.disk is not None:
            self.disk.tick(now)

    async def close(self) -> None:
        """End the current round. Twice is fine."""
        await self._duplicates.close()
        if self._round is not None:
            await asyncio.wait([self._round])
        if self.disk is not None:
            await self.disk.close()

    def _keep(self) -> None:
        retention = self.retention
        retention.observe()
        self._owner.evict_ahead(
            self._free_target, retention.rank, are_duplicates=retention.are_duplicates
        )
