"""A tier without Ray, which a test and its engines find through the environment as engines do."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.engine import saver
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.waiting import wait_for


@contextmanager
def tier_environment(**settings: str) -> Iterator[dict[str, str]]:
    """Give variables that lead to a directory of the test's own; nothing runs there yet."""
    directory = tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-")
    settings = {
        "ARENA__DIR": directory,
        "ARENA__LOCK_WAIT_S": "1",
        "CONNECTOR__MODEL_KEY": "tiny",
        "CONNECTOR__ATTACH_RETRY_S": "0.02",
        **settings,
    }
    variables = {f"KVRAY_{name}": value for name, value in settings.items()}
    # Engines wait for longer than they do: a busy machine makes no miss, and drops no save.
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(saver, "_STALL_S", 30.0),
        mock.patch.object(saver, "_LOCK_WAIT_S", 30.0),
    ):
        yield variables
    shutil.rmtree(directory)


SMALL = {"ARENA__CAPACITY": "1MiB", "ARENA__SLAB": "64KiB", "ARENA__SLOT_MIN": "4KiB"}


class Tier:
    """A shard that comes and goes."""

    def __init__(self) -> None:
        self.line = Line()
        self.start()

    def start(self) -> None:
        settings = ShardSettings.of(load_config())
        self.shard = self.line.follow(Shard("test", settings))
        self.shard.start()
        wait_until_serving(self.shard)

    def stop(self, *, retire: bool = True) -> None:
        self.shard.stop(retire=retire, timeout_s=10)

    def replace(self) -> None:
        self.stop()
        self.start()

    def wait_for_stored(self, count: int) -> None:
        """Return once so many blocks have been stored."""
        wait_for(lambda: self.stored() >= count, "storing")

    def stored(self) -> int:
        return int(self.shard.status()["arena"]["stored"])

    def wait_for_engine(self) -> None:
        """Return once an engine's rank has registered."""
        wait_for(lambda: any(one["connected"] for one in self.shard.status()["replicas"]))
