"""What the tests of a shard build: small shards without Ray, and a lookup that follows them."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvray.actors.lookup.delta import Poll
from kvray.actors.lookup.followers import Followers
from kvray.actors.lookup.lookup import Lookup
from kvray.actors.shard.nvme_tier import NvmeSettings
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import ArenaConfig, ShardConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey, Namespace
from kvray.index import Run
from kvray.store import Arena
from tests.unit.store.nvme.small_store import spec as nvme_spec
from tests.unit.store.small_arena import PATIENT_S, spec
from tests.waiting import wait_for

WAIT_S = 60.0
"""How long a test waits for what takes milliseconds on a machine that does nothing else."""

NAMESPACE = Namespace(
    model="key:llama-3@1",
    quantization="none",
    overrides="",
    kv_dtype="bfloat16",
    num_layers=2,
    kv_factor=2,
    tokens_per_block=32,
    part_bytes=512,
    num_parts=1,
    tp_layout="tp1",
    layer_groups="",
    attention_backend="test",
    engine="test 1.0",
)
OTHER_LAYOUT = replace(NAMESPACE, kv_dtype="float8", part_bytes=256)


class Line:
    """A lookup that follows shards without Ray, and can be replaced.

    Its thread begins with the first shard that it follows, and ends after the last one.
    """

    def __init__(self) -> None:
        self.heard: list[Poll] = []
        """Polls that were answered."""
        self._shards: dict[str, Shard] = {}
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = True  # whether the thread is not there, or about to end
        self.replace()

    def replace(self) -> None:
        """Have the lookup start again with nothing."""
        self.followers = Followers(Lookup(), self._ask, look_s=0.02, retry_s=0.02)
        self._is_replaced = True

    @property
    def lookup(self) -> Lookup:
        return self.followers.lookup

    def follow(self, shard: Shard) -> Shard:
        """Follow a shard, which has not started yet, until it ends."""
        with self._changing:
            self._shards[shard.name] = shard
            if self._is_over:
                if self._thread is not None:
                    self._thread.join()
                self._is_over = False
                self._is_replaced = True  # the thread before may have seen to it, and then ended
                options: dict[str, Any] = {"name": "kvray-test-lookup", "daemon": True}
                self._thread = threading.Thread(target=self._run, **options)
                self._thread.start()
        return shard

    def _run(self) -> None:
        asyncio.run(self._follow())

    async def _follow(self) -> None:
        following = None
        while True:
            shards = list(self._shards.values())
            ended = [one for one in shards if one.status()["state"] in ("stopped", "failed")]
            with self._changing:  # another one may have the name of one that has ended
                self._shards = {n: one for n, one in self._shards.items() if one not in ended}
                if not self._shards:
                    self._is_over = True
                    return
            if self._is_replaced:
                self._is_replaced = False
                if following is not None:
                    following.cancel()
                following = asyncio.create_task(self.followers.run())
            await asyncio.sleep(0.01)

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "shard_names":
            return list(self._shards)
        if actor not in self._shards:
            raise ShardUnavailable(f"{actor} has ended.")
        call = partial(self._shards[actor].requests.delta, *args)
        try:
            delta = await asyncio.get_running_loop().run_in_executor(None, call)
        except RuntimeError as error:  # this process ends, and with it the threads
            raise ShardUnavailable(str(error)) from None
        self.heard.append(args[0])
        return delta

    def locate(self, keys: bytes) -> list[Run]:
        with self.followers.query() as lookup:
            return lookup.locate(keys)

    def targets(self) -> list[str]:
        with self.followers.query() as lookup:
            return lookup.targets()

    def matched(self, keys: list[BlockKey]) -> int:
        with self.followers.query() as lookup:
            return lookup.index.match(b"".join(keys), 1).num_blocks


def settings_for(directory: Path, **changes: Any) -> ShardSettings:
    """Return the settings of a small shard; `changes` are of them, or of one of two sections."""
    arena = {"free_target": 0.0, "limbo_s": 0.0}
    shard = {"announce_s": 0.02, "heartbeat_s": 0.1}
    own: dict[str, Any] = {"spec": spec()}
    for name, value in changes.items():
        if name in ShardSettings.__dataclass_fields__:
            own[name] = value
        else:
            (shard if name in ShardConfig.model_fields else arena)[name] = value
    return ShardSettings(
        directory=directory, arena=ArenaConfig(**arena), shard=ShardConfig(**shard), **own
    )


def nvme_for(parent: Path, **changes: Any) -> NvmeSettings:
    """Return the settings of 256 blocks on disk; from a half full arena on they are written."""
    settings = NvmeSettings(
        directory=parent / "nvme",
        spec=nvme_spec(num_segments=16),
        high_watermark=0.5,
        bytes_per_day=None,
        flush_s=10.0,
        reads_max=2,
    )
    return replace(settings, **changes)


def wait_until_serving(shard: Shard) -> None:
    wait_for(lambda: shard.status()["state"] in ("serving", "failed"), "the shard's start")
    status = shard.status()
    assert status["state"] == "serving", status


def failed_with(shard: Shard) -> str:
    """Return the sentence of a shard that could not start."""
    wait_for(lambda: shard.status()["state"] == "failed", "the failure")
    return str(shard.status()["message"])


def open_arena(directory: Path) -> Arena:
    """Map the shard's arena as an engine does, and become a holder."""
    arena = Arena(directory, lock_wait_s=PATIENT_S)
    arena.join("test")
    return arena
