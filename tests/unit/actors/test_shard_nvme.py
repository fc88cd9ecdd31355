"""A shard without Ray, with blocks on disk: demoted, promoted, flushed, found again."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.identity.block import BlockKey
from kvray.node.stage_calls import ShardSocket
from kvray.store.arena.file import ARENA_FILE
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    failed_with,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import SLOT, chain, fetch, store
from tests.waiting import wait_for

MINE = replace(NAMESPACE, part_bytes=SLOT)


@dataclass
class Node:
    """A shard that can be ended and started again, and an engine beside it."""

    parent: Path
    shard: Shard | None = None
    line: Line = field(default_factory=Line)

    def start(self, *, is_restart: bool = False, **changes: Any) -> Shard:
        directory = self.parent / "shm"
        settings = settings_for(
            directory,
            nvme=nvme_for(self.parent, **changes),
            free_target=0.1,
            policy="lru",
            admission="all",
        )
        self.shard = Shard("kvray-shard-n", settings, [self.line.announce], is_restart=is_restart)
        self.shard.start()
        return self.shard

    def stop(self, *, flush: bool) -> None:
        if self.shard is not None:
            self.shard.stop(retire=True, timeout_s=20, flush=flush)
            self.shard = None

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.shard.status()["nvme"]
        return found

    def store(self, keys: list[BlockKey]) -> None:
        with contextlib.closing(open_arena(self.parent / "shm")) as arena:
            store(arena, keys)

    def wait_until_looked_at(self, keys: list[BlockKey]) -> None:
        """Return once the shard ranks `keys`: what came since its last look goes last."""
        wait_for(lambda: self.line.matched(keys) == len(keys))
        heard = len(self.line.heard)
        wait_for(lambda: len(self.line.heard) >= heard + 3)

    def stage(self, keys: list[BlockKey]) -> dict[str, Any]:
        engine = ShardSocket(self.parent / "shm")
        try:
            engine.call(
                "register",
                timeout_s=5,
                replica="r",
                rank=0,
                namespace=MINE.to_wire(),
                wanted=[[0, None]],
            )
            joined = b"".join(keys)
            return engine.call(
                "stage",
                timeout_s=5,
                replica="r",
                rank=0,
                keys=joined,
                wait_s=5.0,
                tokens_per_s=0,
            )
        finally:
            engine.close()

    def num_right(self, keys: list[BlockKey]) -> int:
        """Return how many leading keys are in the arena, all of their bytes right."""
        with contextlib.closing(open_arena(self.parent / "shm")) as arena:
            held = arena.lease(keys)
            if not held:
                return 0
            assert fetch(arena, keys, held[0])
            arena.release(held[0], wait_s=5)
            return held[0].num_slots


@pytest.fixture
def node() -> Iterator[Node]:
    parent = Path(tempfile.mkdtemp(prefix="kvray-test-"))
    (parent / "shm").mkdir()
    node = Node(parent)
    yield node
    with contextlib.suppress(Exception):
        node.stop(flush=False)
    sweep(parent / "shm")
    shutil.rmtree(parent)


def test_what_leaves_a_full_arena_is_a_hit_from_disk(node):
    wait_until_serving(node.start())
    old = chain(30, seed="old")
    node.store(old)
    node.wait_until_looked_at(old)
    node.store(chain(20, seed="new"))
    wait_for(lambda: node.status()["demoted_blocks"] >= 30)
    node.store(chain(60, seed="more"))
    wait_for(lambda: node.num_right(old) < 30)
    answer = node.stage(old)
    assert "nvme" in {way for _, way, _ in answer["arrivals"]}
    # Blocks that are being written to disk cannot make room: the next request gets the rest.
    wait_for(lambda: node.stage(old)["num_blocks"] == 30)
    assert node.stage(old)["reason"] == "none"
    assert node.num_right(old) == 30
    staging = node.shard.status()["staging"]
    assert staging["transports"]["nvme"]["blocks"] > 0
    assert node.status()["promoted_blocks"] == staging["transports"]["nvme"]["blocks"]


def test_what_nobody_has_is_not_stored(node):
    wait_until_serving(node.start())
    node.store(chain(40))
    wait_for(lambda: node.status()["demoted_blocks"])
    assert node.stage(chain(5, seed="other"))["reason"] == "not_stored"


def test_a_flushed_tier_has_everything_after_a_new_start(node):
    wait_until_serving(node.start())
    keys = chain(20)
    node.store(keys)
    node.stop(flush=True)
    assert not (node.parent / "shm" / ARENA_FILE).exists()
    wait_until_serving(node.start())
    assert node.status()["recovered_blocks"] == 20
    assert node.num_right(keys) == 0
    assert node.stage(keys)["num_blocks"] == 20
    assert node.num_right(keys) == 20


def test_without_a_flush_what_was_not_demoted_is_gone(node):
    wait_until_serving(node.start())
    node.store(chain(20))
    node.stop(flush=False)
    wait_until_serving(node.start())
    assert node.status()["recovered_blocks"] == 0


def test_what_was_cleared_does_not_come_back(node):
    shard = node.start()
    wait_until_serving(shard)
    keys = chain(40)
    node.store(keys)
    wait_for(lambda: node.status()["demoted_blocks"] == 40)
    assert shard.clear(5.0) == 80
    assert node.stage(keys)["num_blocks"] == 0
    node.stop(flush=True)
    wait_until_serving(node.start())
    assert node.status()["recovered_blocks"] == 0


def test_a_damaged_file_costs_blocks_and_serves_no_wrong_one(node):
    wait_until_serving(node.start())
    keys = chain(30)
    node.store(keys)
    node.stop(flush=True)
    for path in (node.parent / "nvme").iterdir():
        content = np.fromfile(path, dtype=np.uint8)
        content[len(content) // 2 :: 3 * SLOT] ^= 1
        content.tofile(path)
    wait_until_serving(node.start())
    answer = node.stage(keys)
    assert answer["num_blocks"] < 30
    assert node.num_right(keys) == answer["num_blocks"]


def test_a_directory_that_cannot_be_used_is_said(node):
    (node.parent / "file").touch()
    message = failed_with(node.start(directory=node.parent / "file" / "nvme"))
    assert "cannot be used for the NVMe tier" in message
