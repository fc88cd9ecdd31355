"""A shard without Ray in a small directory, and caches on it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig, load_config
from kvray.tensor_cache import TensorCache
from tests.unit.tensor_cache.kv import BLOB, METADATA, TOKENS, changed
from tests.waiting import wait_for

MakeCache = Callable[..., TensorCache]


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
    """Start a shard whose lookup believes everything."""
    settings = ShardSettings.of(config)
    shard = Shard("test", settings)
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


@pytest.fixture
def cache(shard: Shard, make_cache: MakeCache) -> TensorCache:
    return make_cache()


@pytest.fixture
def stored(cache: TensorCache) -> TensorCache:
    """The same cache with TOKENS stored: BLOB."""
    assert cache.store(TOKENS, BLOB) == len(TOKENS)
    return cache
