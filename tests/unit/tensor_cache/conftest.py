"""A shard without Ray in a small directory, and caches on it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvray.actors.lookup.lookup import Announcement, Answer
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig, load_config
from kvray.tensor_cache import TensorCache, TensorMetadata
from tests.waiting import wait_for

BLOCK = 4
METADATA = TensorMetadata(
    model="tiny",
    dtype=torch.float32,
    num_layers=3,
    num_kv_heads=2,
    head_size=8,
    tokens_per_block=BLOCK,
)
MakeShard = Callable[[], Shard]
MakeCache = Callable[..., TensorCache]


def announce(announcement: Announcement) -> Answer:
    """Answer as a lookup that believes everything."""
    return Answer(lookup_epoch="test", resync=False)


@pytest.fixture(scope="module")
def config() -> Iterator[KVRayConfig]:
    """Settings of a tier of 256 blocks in a directory of its own; nothing runs yet."""
    directory = tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-")
    yield load_config(
        environ={},
        overrides={
            "arena.dir": directory,
            "arena.capacity": "1MiB",
            "arena.slab": "64KiB",
            "arena.slot_min": "4KiB",
            "arena.holders_max": 8,
            # Longer than engines try, so that a busy machine makes no miss.
            "arena.lock_wait_s": 0.1,
            "connector.attach_retry_s": 0.02,
            "connector.replica": "test",
        },
    )
    shutil.rmtree(directory)


def start_shard(config: KVRayConfig) -> Shard:
    shard = Shard("test", ShardSettings.of(config), [announce])
    shard.start()
    wait_for(lambda: shard.status()["state"] == "serving")
    return shard


@pytest.fixture(scope="module")
def running_shard(config: KVRayConfig) -> Iterator[Shard]:
    shard = start_shard(config)
    yield shard
    shard.stop(retire=True, timeout_s=10)


@pytest.fixture
def shard(running_shard: Shard) -> Shard:
    """A shard whose arena is empty."""
    running_shard.clear(10)
    return running_shard


@pytest.fixture
def make_cache(config: KVRayConfig) -> Iterator[MakeCache]:
    """Make caches that end with the test; keywords change their metadata."""
    caches: list[TensorCache] = []

    def make(settings: KVRayConfig = config, **changes: Any) -> TensorCache:
        caches.append(TensorCache(settings, changed(METADATA, **changes)))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()
    caches.clear()  # pytest keeps `make`, and with it this list, until all fixtures have ended


def changed(metadata: TensorMetadata, **changes: Any) -> TensorMetadata:
    return replace(metadata, **changes)
