"""A shard without Ray for all tests of the folder, found through the environment as engines do."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.node import link as link_module
from kvray.store import Arena
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.connector.pair import Pair
from tests.unit.engine.device.host_device import HostDevice
from tests.unit.node.stage_server import StageServer
from tests.waiting import wait_for

MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Variables that lead to a directory of this module's own; nothing runs there yet."""
    directory = tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-")
    variables = {
        "KVRAY_ARENA__DIR": directory,
        "KVRAY_ARENA__CAPACITY": "1MiB",
        "KVRAY_ARENA__SLAB": "64KiB",
        "KVRAY_ARENA__SLOT_MIN": "4KiB",
        # Longer than engines try, so that a busy machine makes no miss.
        "KVRAY_ARENA__LOCK_WAIT_S": "1",
        "KVRAY_CONNECTOR__MODEL_KEY": "tiny",
        "KVRAY_CONNECTOR__ATTACH_RETRY_S": "0.02",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    yield variables
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(directory)


def start_shard() -> Shard:
    shard = Shard("test", ShardSettings.of(load_config()), [Line().announce])
    shard.start()
    wait_until_serving(shard)
    return shard


@pytest.fixture(scope="module")
def running_shard(environment: dict[str, str]) -> Iterator[Shard]:
    shard = start_shard()
    yield shard
    shard.stop(retire=True, timeout_s=10)


@pytest.fixture
def shard(running_shard: Shard) -> Shard:
    """A shard whose arena is empty."""
    running_shard.clear(10)
    return running_shard


@pytest.fixture
def server(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageServer]:
    """A test between the shard and its engines: it says what other nodes have."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "5")
    made = StageServer(shard._settings.directory)
    yield made
    made.close()


@pytest.fixture(params=["host", "device"])
def make_pair(
    environment: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePair]:
    """Make connectors that end with the test, with the code of either kind of pool."""
    if request.param == "device":
        monkeypatch.setattr("kvray.engine.model.cache_layout.CacheLayout.is_host", False)
        monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: HostDevice())
        monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", "always")
    pairs: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        pairs.append(Pair(*args, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    pairs.clear()


def arena_of(pair: Pair) -> Arena:
    arena = pair.worker._rank.shared.link.arena
    assert arena is not None
    return arena


def leased(pair: Pair) -> int:
    """Return how many blocks are leased once the background has done its work."""
    return int(arena_of(pair).stats()["leased_blocks"])


def wait_for_arena(pair: Pair) -> None:
    wait_for(lambda: pair.worker._rank.shared.link.arena is not None, "joining the tier")
