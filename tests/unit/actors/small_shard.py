"""What the tests of a shard build: small shards without Ray, and a lookup that they announce to."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvray.actors.lookup.lookup import Announcement, Answer, Lookup
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
    """Brings announcements to a lookup, which can be cut off, slow, or replaced.

    The actor takes one call at a time, so calls of several shards' threads wait for `turn` here.
    """

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.turn = threading.Lock()
        self.cut = False
        self.hang_s = 0.0
        self.late = 0
        """Answers that are said to be late, before one is given."""
        self.heard: list[Announcement] = []

    def announce(self, announcement: Announcement) -> Answer | None:
        time.sleep(self.hang_s)
        if self.late:
            self.late -= 1
            return None
        if self.cut:
            raise ShardUnavailable("The lookup is cut off.")
        with self.turn:
            self.heard.append(announcement)
            return self.lookup.announce(announcement, time.monotonic())

    def locate(self, keys: bytes) -> list[Run]:
        with self.turn:
            return self.lookup.locate(keys, time.monotonic())

    def targets(self) -> list[str]:
        with self.turn:
            return self.lookup.targets(time.monotonic())

    def matched(self, keys: list[BlockKey]) -> int:
        with self.turn:
            return self.lookup.index.match(b"".join(keys), 1).num_blocks


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
