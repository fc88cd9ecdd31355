"""A node's directory with a shard that can be started, stopped and started again."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from tests.unit.actors.small_shard import Line, settings_for, wait_until_serving

StartShard = Callable[..., Shard]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A cluster's directory, which the shard makes."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield parent / "kvray-test"
    shutil.rmtree(parent)


@pytest.fixture
def start_shard(directory: Path) -> Iterator[StartShard]:
    """Starts a shard and returns when it serves."""
    shards: list[Shard] = []

    def start(**changes: Any) -> Shard:
        shards.append(Shard("a", settings_for(directory, **changes), [Line().announce]))
        shards[-1].start()
        wait_until_serving(shards[-1])
        return shards[-1]

    yield start
    for shard in shards:
        shard.stop(retire=False, timeout_s=10)
    sweep(directory)
