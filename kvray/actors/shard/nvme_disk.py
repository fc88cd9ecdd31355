"""The disk of a node's NVMe tier: opened at the start, closed when it fails, opened again later.

Without it the node serves from its memory. Work that waits for the device runs in a thread, one
piece at a time; nobody waits for work that hangs.
"""

import asyncio
import logging
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvray.actors.shard.nvme_tier import NvmeSettings, NvmeTier
from kvray.errors import ConfigError, KVRayError, ShardUnavailable, TierError
from kvray.store import Arena
from kvray.store.block_history import BlockHistory
from kvray.store.demoter import DemotionCounts
from kvray.store.nvme import NvmeStats
from kvray.store.nvme.disk import device_errors
from kvray.store.retention import Retention

_log = logging.getLogger("kvray.shard")

_START_S = 20.0  # how long a shard waits for its disk before it serves without it
_RETRY_S = 0.1
"""Pause between two tries at the start, while an earlier process still has the directory."""
_PAUSE_S = (1.0, 15.0)
"""Shortest and longest time between two tries to open the disk again."""
_LOOK_S = 1.0  # how often the directory is checked for being where its files are
_SOUND_S = 60.0
"""A disk that worked for this long counts as healthy, and its pauses start short again."""
_CLOSE_S = 5.0  # how long an ending shard waits for its disk


class NvmeDisk:
    """Has the NVMe tier while the disk works; used by the shard's event loop."""

    def __init__(
        self,
        arena: Arena,
        retention: Retention,
        settings: NvmeSettings,
        gone: BlockHistory,
        *,
        shard: str,
    ) -> None:
        self.tier: NvmeTier | None = None  # None: the disk is out, or not open yet
        self._arena = arena
        self._arguments = arena, retention, settings, gone
        self._retention = retention
        self._settings = settings
        self._shard = shard
        self._work: asyncio.Future[NvmeTier | None] | None = None
        self._look: asyncio.Future[None] | None = None
        self._reason = ""
        self._pause_s = _PAUSE_S[0]
        self._try_at = self._look_at = self._opened_at = 0.0
        self._must_exist = False
        self._device: int | None = None
        self._is_closing = False

    async def open(self, stopping: asyncio.Event, *, is_restart: bool) -> None:
        """Open the tier until `stopping` is set; `tick` tries a disk again that fails or hangs.

        At a restart, where the shard served with these settings before, a directory that is missing
        now is a disk that is out. Otherwise ConfigError: directory or sizes cannot be used.
        """
        self._must_exist = is_restart
        until = time.monotonic() + _START_S
        while self.tier is None and not stopping.is_set() and (now := time.monotonic()) < until:
            if self._work is None:
                self._begin()
            assert self._work is not None, "it has just begun"
            await asyncio.wait({self._work}, timeout=min(_RETRY_S, until - now))
            error = self._end(time.monotonic())
            if isinstance(error, ConfigError) and not is_restart:
                raise error
            if isinstance(error, ShardUnavailable):
                await asyncio.sleep(_RETRY_S)
            elif error is not None:
                break
        if self.tier is None and not self._reason:
            self._say(f"{self._settings.directory} does not answer.")

    def tick(self, now: float) -> None:
        """Do what is due; called often."""
        if self._work is not None:
            self._end(now)
        elif self.tier is None:
            if now >= self._try_at:
                self._begin()
        elif failure := self.tier.reads.failure or self._looked(self.tier, now):
            self._let_go(self.tier, failure, now)
        else:
            self.tier.tick(now)

    async def close(self) -> None:
        """Close the tier, as far as the device answers.

        A read that hangs may end much later, in slots that nobody else must have until then.
        """
        self._is_closing = True
        work = self._work
        if self.tier is not None and work is None:
            work = self._closing(self.tier)
        self.tier, self._work = None, None
        if work is not None:
            await asyncio.wait({work}, timeout=_CLOSE_S)
            if not work.done():
                work.cancel()
                self._arena.stay()
                _log.error("%s: its disk does not answer; it is not waited for", self._shard)
            elif work.exception() is None and (tier := work.result()) is not None:
                await self._closing(tier)

    def status(self) -> dict[str, Any]:
        """Return figures for people; from any thread."""
        figures = {
            "state": "out",
            "directory": str(self._settings.directory),
            "capacity_bytes": self._settings.spec.capacity,
            **{one.name: 0 for one in fields(NvmeStats)},
            "is_direct": True,
            "namespaces": {},
            **asdict(DemotionCounts()),
            "promoted_blocks": 0,
            "promoted_bytes": 0,
            "write_budget_bytes": None,
            "recovered_blocks": 0,
            "recovery_s": 0.0,
            "message": self._reason or "The disk is being opened.",
            "remarks": [],
        }
        tier = self.tier
        return figures if tier is None else {**figures, "state": "open", **tier.status()}

    def _begin(self) -> None:
        self._work = asyncio.get_running_loop().run_in_executor(None, self._open)

    def _open(self) -> NvmeTier | None:
        directory = self._settings.directory
        with device_errors(directory, "looked at"):
            root = os.stat("/").st_dev
            was_elsewhere = self._device not in (None, root)
            may_be_elsewhere = self._must_exist and not directory.exists()
            if (was_elsewhere or may_be_elsewhere) and _device(directory) == root:
                raise TierError(
                    f"{directory} would be on the root file system now; mount its disk, or make the"
                    " directory."
                )
        tier = NvmeTier(*self._arguments)
        if self._is_closing:  # nobody waits for it
            tier.close()
            return None
        self._device, self._must_exist = _device(directory), True
        return tier

    def _looked(self, tier: NvmeTier, now: float) -> str:
        """Return why the files of a tier without errors are out of reach, if they are."""
        if self._look is None:
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                loop = asyncio.get_running_loop()
                self._look = loop.run_in_executor(None, tier.store.check_in_place)
                # An error after its tier was closed concerns nobody.
                self._look.add_done_callback(lambda look: look.cancelled() or look.exception())
        elif self._look.done():
            look, self._look = self._look, None
            try:
                look.result()
            except TierError as error:
                return str(error)
        return ""

    def _end(self, now: float) -> KVRayError | None:
        """Take the result of finished work; return why the disk could not be opened."""
        if self._work is None or not self._work.done():
            return None
        work, self._work = self._work, None
        try:
            tier = work.result()
        except KVRayError as error:
            self._must_exist = True
            self._say(str(error))
            self._wait(now)
            return error
        if tier is not None and self._reason:
            blocks = tier.store.report.blocks
            _log.warning("%s: its disk is back, with %d blocks", self._shard, blocks)
            self._reason = ""
        self.tier, self._opened_at = tier, now
        return None

    def _let_go(self, tier: NvmeTier, failure: str, now: float) -> None:
        """Close a tier whose device failed, so that it can be repaired and mounted again."""
        self._say(failure)
        if now - self._opened_at > _SOUND_S:
            self._pause_s = _PAUSE_S[0]
        self._wait(now)
        self.tier = self._look = None
        self._retention.drop_below()
        self._work = self._closing(tier)

    def _closing(self, tier: NvmeTier) -> "asyncio.Future[NvmeTier | None]":
        return asyncio.get_running_loop().run_in_executor(None, tier.close)

    def _wait(self, now: float) -> None:
        self._try_at = now + self._pause_s
        self._pause_s = min(_PAUSE_S[1], 2 * self._pause_s)

    def _say(self, reason: str) -> None:
        if reason != self._reason:  # log it once, however often it is tried
            self._reason = reason
            _log.error("%s goes on without its disk: %s", self._shard, reason)


def _device(directory: Path) -> int:
    """Return the device of a directory, or of the place where it would be made."""
    return next(one for one in (directory, *directory.parents) if one.exists()).stat().st_dev
