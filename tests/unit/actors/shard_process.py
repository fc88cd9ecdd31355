"""A shard in a process that, as if it were an engine too, has a lease and a reservation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvray.actors.shard.shard import Shard
from tests.far import Far
from tests.unit.actors.small_shard import Line, open_arena, settings_for, wait_until_serving
from tests.unit.store.small_arena import SLOT, chain, store

STORED, RESERVED = chain(4), chain(2, seed="reserved")


@contextmanager
def shard_process(directory: Path, name: str) -> Iterator[Far]:
    """Give such a process once its shard serves; it is killed at the end."""
    process = Far("tests.unit.actors.shard_process:InUse", directory, name)
    try:
        yield process
    finally:
        process.kill()


class InUse:
    """The far end."""

    def __init__(self, directory: Path, name: str) -> None:
        self._shard = Line().follow(Shard(name, settings_for(directory)))
        self._shard.start()
        wait_until_serving(self._shard)
        self._arena = open_arena(directory)
        store(self._arena, STORED)
        assert self._arena.lease(STORED)
        assert self._arena.reserve(RESERVED, parent=None, depth=0, part=0, block_bytes=SLOT)

    def stop(self) -> None:
        self._shard.stop(retire=False, timeout_s=10)
