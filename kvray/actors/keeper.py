"""Keeps a node's memory in order: which blocks leave it, and which of those go to disk."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import numpy as np

from kvray.actors.async_calls import Ask
from kvray.actors.nvme_tier import NvmeSettings, NvmeTier
from kvray.actors.spares import Spares
from kvray.errors import ShardUnavailable, TierError
from kvray.store import ArenaOwner
from kvray.store.nvme import NvmeStore
from kvray.store.nvme.demoter import Progress
from kvray.store.retention import Retention
from kvray.store.use_counts import UseCounts

_log = logging.getLogger("kvray.shard")

_WAIT_S = 20.0
"""How long another process may take to let go of the NVMe tier's directory."""
_RETRY_S = 0.1
_AHEAD_SHARE = 1 / 8
"""Of an arena, beyond what is kept free: once less than that is left it is asked what is spare."""


class Keeper:
    """A shard's hand on what is in its tiers; used by its event loop."""

    def __init__(
        self,
        owner: ArenaOwner,
        *,
        free_target: float,
        policy: str,
        admission: str,
        shard: str,
        ask: Ask,
        num_shards: Callable[[], int],
    ) -> None:
        """Keep the arena of `owner`.

        Args:
            owner: of the arena, which was adopted.
            free_target: share of the slots that is kept free.
            policy: what decides which blocks go first, see `kvray.store.policy`.
            admission: what decides which of them are worth a write, likewise.
            shard: the shard's name.
            ask: calls the lookup, which knows what other shards have.
            num_shards: live shards of the tier, as far as is known.
        """
        self._shard = shard
        self.nvme: NvmeTier | None = None
        """None: there is none, or its device failed."""
        self._owner = owner
        self._free_target = free_target
        self._retention = Retention(owner.arena, policy, admission)
        self._round: asyncio.Future[None] | None = None
        self._spares = Spares(self._retention, shard=shard, ask=ask, num_shards=num_shards)
        self._free_share = free_target + _AHEAD_SHARE
        """While no more than that is free, blocks may have to go soon, or to be written."""

    async def open_nvme(self, settings: NvmeSettings, stopping: asyncio.Event) -> None:
        """Open the NVMe tier, once an earlier self has let go of it; without its device go on so.

        Raises:
            ShardUnavailable: another process goes on owning its directory, or `stopping` is set.
            CapacityError, ConfigError: it cannot be made as it is to be.
        """
        loop, until = asyncio.get_running_loop(), time.monotonic() + _WAIT_S
        while self.nvme is None:
            try:
                owner = self._owner
                self.nvme = await loop.run_in_executor(
                    None, NvmeTier, owner.arena, self._retention, settings, owner.departures
                )
                self._free_share = max(self._free_share, 1.0 - settings.high_watermark)
            except TierError as error:
                _log.error("%s goes on without its NVMe tier: %s", self._shard, error)
                return
            except ShardUnavailable:
                if time.monotonic() > until or stopping.is_set():
                    raise
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _RETRY_S)

    @property
    def store(self) -> NvmeStore | None:
        """The blocks on disk, if there is an NVMe tier."""
        return None if self.nvme is None else self.nvme.store

    @property
    def uses(self) -> UseCounts:
        """How often the arena's blocks were used, for people."""
        return self._retention.uses

    @property
    def num_spare(self) -> int:
        """Blocks of the arena that another shard is known to keep at the moment; any thread."""
        num_slots = self._owner.arena.tables.geometry.num_slots
        return int(np.count_nonzero(self._retention.are_spare(np.arange(num_slots))))

    def tick(self, now: float) -> None:
        """Go on with what is to be done; called often.

        Raises:
            KVRayError: the round before ended so; other errors are defects.
        """
        if self._round is None or self._round.done():
            if self._round is not None:
                self._round.result()
            # In a thread, because all blocks are ranked for it.
            self._round = asyncio.get_running_loop().run_in_executor(None, self._keep)
        self._spares.tick(now, free_share=self._free_share)
        if self.nvme is not None:
            self.nvme.tick(now)

    async def flush(self, progress: Progress) -> None:
        """Write to disk what is in memory only, as far as the settings go."""
        if self.nvme is not None:
            await self.nvme.flush(progress)

    async def close(self) -> None:
        """End what is under way. Twice is fine."""
        await self._spares.close()
        if self._round is not None:
            await asyncio.wait([self._round])
        if self.nvme is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.nvme.close)

    def _keep(self) -> None:
        self._retention.observe()
        retention = self._retention
        self._owner.evict_ahead(self._free_target, retention.rank, are_spare=retention.are_spare)
