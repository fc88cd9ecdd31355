"""A shard without Ray, with blocks on disk: demoted, promoted, flushed, found again.

If its disk fails or hangs it serves from its memory, says so, and takes the disk back.
"""

import contextlib
import errno
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard import nvme_disk, nvme_tier
from kvray.actors.shard.shard import Shard
from kvray.errors import TierError
from kvray.identity.block import BlockKey
from kvray.node.stage_calls import ShardSocket
from kvray.store.nvme import disk as disk_module
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    failed_with,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.mounted import run_mounted
from tests.unit.store.nvme.small_store import spec
from tests.unit.store.small_arena import SLOT, chain, served, store
from tests.waiting import wait_for

MINE = replace(NAMESPACE, part_bytes=SLOT)
KEYS = chain(40)


class Node:
    """A shard that can be ended and started again, and an engine beside it."""

    def __init__(self, parent: Path) -> None:
        self.parent, self.directory = parent, parent / "shm"
        self.line = Line()

    def start(self, *, is_restart: bool = False, **changes: Any) -> Shard:
        nvme = nvme_for(self.parent, **changes)
        asked = {"free_target": 0.1, "policy": "lru", "admission": "all"}
        settings = settings_for(self.directory, nvme=nvme, **asked)
        self.shard = self.line.follow(Shard("kvray-shard-n", settings, is_restart=is_restart))
        self.shard.start()
        return self.shard

    def serve(self, **changes: Any) -> None:
        wait_until_serving(self.start(**changes))

    def stop(self, *, flush: bool) -> None:
        self.shard.stop(retire=True, timeout_s=20, flush=flush)

    def status(self) -> dict[str, Any]:
        return dict(self.shard.status()["nvme"])

    def store(self, keys: list[BlockKey]) -> None:
        with contextlib.closing(open_arena(self.directory)) as arena:
            store(arena, keys)

    def stage(self, keys: list[BlockKey]) -> dict[str, Any]:
        rank = {"timeout_s": 5, "replica": "r", "rank": 0}
        with contextlib.closing(ShardSocket(self.directory)) as engine:
            engine.call("register", **rank, namespace=MINE.to_wire(), wanted=[[0, None]])
            joined = b"".join(keys)
            return engine.call("stage", **rank, keys=joined, wait_s=5.0, tokens_per_s=0)

    def lose_from_memory(self) -> None:
        serving = self.shard._require_serving()
        self.shard._loop.call(serving.owner.clear, 5.0)

    def num_right(self, keys: list[BlockKey]) -> int:
        """Return how many leading keys are in the arena, all of their bytes right."""
        with contextlib.closing(open_arena(self.directory)) as arena:
            return served(arena, keys)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvray-test-") as parent:
        node = Node(Path(parent))
        yield node
        with contextlib.suppress(Exception):
            node.stop(flush=False)
        sweep(node.directory)


@pytest.fixture
def full(node: Node) -> Node:
    """The node, which serves and has KEYS in memory and on disk."""
    node.serve()
    node.store(KEYS)
    wait_for(lambda: node.status()["demoted_blocks"] == 40)
    return node


def test_what_leaves_a_full_arena_is_a_hit_from_disk(node):
    node.serve()
    old = chain(30, seed="old")
    node.store(old)
    # What came since its last look goes last.
    wait_for(lambda: node.line.matched(old) == 30)
    heard = len(node.line.heard)
    wait_for(lambda: len(node.line.heard) >= heard + 3)
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


@pytest.mark.parametrize(("flush", "num_blocks"), [(True, 20), (False, 0)])
def test_a_flushed_tier_and_no_other_has_everything_after_a_new_start(node, flush, num_blocks):
    node.serve()
    keys = chain(20)
    node.store(keys)
    node.stop(flush=flush)
    assert not node.directory.exists()
    node.serve()
    assert node.status()["recovered_blocks"] == num_blocks
    assert node.num_right(keys) == 0
    assert node.stage(keys)["num_blocks"] == num_blocks
    assert node.num_right(keys) == num_blocks


def test_what_was_cleared_does_not_come_back(full):
    assert full.shard.clear(5.0) == 80
    assert full.stage(KEYS)["num_blocks"] == 0
    full.stop(flush=True)
    full.serve()
    assert full.status()["recovered_blocks"] == 0


def test_a_directory_that_cannot_be_used_is_said_and_nothing_is_made_but_the_last_one(node):
    (node.parent / "file").touch()
    message = failed_with(node.start(directory=node.parent / "file" / "nvme"))
    assert "cannot be used for the NVMe tier" in message
    node.stop(flush=False)
    message = failed_with(node.start(directory=node.parent / "mnt" / "nvme" / "kvray-x"))
    assert "does not exist; mount the disk, or correct nvme.dir" in message
    assert not (node.parent / "mnt").exists()
    node.stop(flush=False)
    node.serve(directory=node.parent / "nvme" / "kvray-x")
    assert (node.parent / "nvme" / "kvray-x").is_dir()


# -- a disk that fails, hangs or goes -------------------------------------------------------------


class Device:
    """The calls that move bytes, which can be made to fail or to hang."""

    def __init__(self) -> None:
        self.error = 0
        self.answers = threading.Event()
        self.answers.set()
        self.num_hanging = 0

    def call(self, real: Any) -> Any:
        def act(*args: Any) -> Any:
            if not self.answers.is_set():
                self.num_hanging += 1
                self.answers.wait(60)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args)

        return act


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(disk_module.os, name, made.call(getattr(os, name)))
    monkeypatch.setattr(nvme_disk, "_PAUSE_S", (0.1, 0.2))
    monkeypatch.setattr(nvme_tier, "_STALL_S", 0.2)
    yield made
    made.answers.set()


def has_open(directory: Path) -> bool:
    return any(one.path.startswith(str(directory)) for one in psutil.Process().open_files())


@pytest.mark.parametrize(
    ("refuses", "said"),
    [("to write", "cannot be written (Input/output error)"), ("to read", "refuses to read")],
)
def test_a_disk_that_fails_is_out_until_it_is_back(full, device, caplog, refuses, said):
    segments = full.parent / "nvme" / "segment"
    assert has_open(segments)
    full.lose_from_memory()
    wait_for(lambda: full.line.matched(KEYS) == 40)
    device.error = errno.EIO
    if refuses == "to write":
        full.store(chain(40, seed="more"))
    else:
        for _ in range(nvme_tier._BAD_READS_MAX):
            full.stage(KEYS)
    wait_for(lambda: full.status()["state"] == "out", "the disk's end")
    wait_for(lambda: not has_open(segments), "the end of its files")
    wait_for(lambda: full.line.matched(KEYS) == 0, "the withdrawal")
    assert said in full.status()["message"]
    assert "goes on without its disk" in caplog.text
    full.store(chain(20, seed="memory"))
    assert full.num_right(chain(20, seed="memory")) == 20
    device.error = 0
    wait_for(lambda: full.status()["state"] == "open", "the disk's return")
    assert full.status()["message"] == ""
    assert "its disk is back, with 40 blocks" in caplog.text
    wait_for(lambda: full.line.matched(KEYS) == 40, "the announcement")
    full.lose_from_memory()
    assert full.stage(KEYS)["num_blocks"] == 40


def test_a_disk_that_hangs_holds_up_one_request_and_then_nobody(full, device, caplog):
    full.lose_from_memory()
    device.answers.clear()
    assert full.stage(KEYS)["num_blocks"] == 0
    assert "does not answer" in full.status()["message"]
    began = time.monotonic()
    for _ in range(20):
        answer = full.stage(KEYS)
        assert (answer["num_blocks"], answer["reason"]) == (0, "too_slow")
    assert time.monotonic() - began < 4.0
    assert device.num_hanging <= 6, "no more threads than there are for reads"
    device.answers.set()
    wait_for(lambda: full.stage(KEYS)["num_blocks"] == 40, "the disk's return")
    wait_for(lambda: full.status()["message"] == "")
    assert "answers again" in caplog.text


def test_a_shard_with_a_disk_that_hangs_can_be_cleared_flushed_and_ended(full, device, monkeypatch):
    monkeypatch.setattr(nvme_tier, "_HUNG_S", 0.3)
    monkeypatch.setattr(nvme_disk, "_CLOSE_S", 0.3)
    device.answers.clear()
    full.store(chain(40, seed="more"))
    wait_for(lambda: device.num_hanging)
    wait_for(lambda: "has not answered a write" in full.status()["message"])
    with pytest.raises(TierError, match="does not answer"):
        full.shard.clear(0.2)
    began = time.monotonic()
    full.stop(flush=True)
    assert time.monotonic() - began < 60
    assert not full.directory.exists()


def test_a_read_that_outlives_its_shard_writes_over_no_block(full, device, monkeypatch):
    monkeypatch.setattr(nvme_disk, "_CLOSE_S", 0.3)
    full.lose_from_memory()
    device.answers.clear()
    full.stage(KEYS)
    assert device.num_hanging
    full.shard.stop(retire=False, timeout_s=20)
    others = chain(64, seed="others")
    full.store(others)
    with contextlib.closing(open_arena(full.directory)) as arena:
        num_stored = int(arena.present(others, [0])[0].sum())
    device.answers.set()
    reads = [one for one in threading.enumerate() if one.name.startswith("kvray-promote")]
    wait_for(lambda: not any(one.is_alive() for one in reads))
    assert full.num_right(others) == num_stored > 0


def test_a_disk_that_hangs_at_the_start_keeps_the_shard_from_nothing(full, device, monkeypatch):
    monkeypatch.setattr(nvme_disk, "_START_S", 0.3)
    full.stop(flush=True)
    device.answers.clear()
    full.serve()
    assert full.status()["state"] == "out"
    assert "does not answer" in full.status()["message"]
    device.answers.set()
    wait_for(lambda: full.status()["state"] == "open", "the disk")
    assert full.stage(KEYS)["num_blocks"] == 40


def test_a_shard_starts_over_a_disk_that_has_become_read_only():
    printed = run_mounted(
        """
import subprocess
from kvray.actors.shard import nvme_disk
from tests.unit.actors.small_shard import wait_for
from tests.unit.actors.test_shard_nvme import Node
from tests.unit.store.small_arena import chain

nvme_disk._PAUSE_S = (0.1, 0.2)
disk, keys = mounted / "disk", chain(20)
disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
node = Node(mounted)
node.serve(directory=disk / "tier")
node.store(keys)
node.stop(flush=True)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
node.serve(directory=disk / "tier")
print(node.status()["state"], node.status()["message"])
node.store(chain(10, seed="memory"))
print(node.num_right(chain(10, seed="memory")))
subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
wait_for(lambda: node.status()["state"] == "open")
print(node.stage(keys)["num_blocks"])
node.stop(flush=False)
""",
        kind="tmpfs",
        options="size=64m",
    )
    out, memory, back = printed.splitlines()
    assert out.startswith("out ")
    assert "Read-only file system" in out
    assert (memory, back) == ("10", "20")


def test_a_directory_that_has_gone_since_is_a_disk_that_is_out(full, device):
    full.stop(flush=True)
    mount = full.parent / "mnt"
    mount.mkdir()
    (full.parent / "nvme").rename(mount / "nvme")
    for where in (full.parent / "nvme", full.parent / "none" / "nvme" / "kvray-x"):
        full.serve(is_restart=True, directory=where)
        assert "mount" in full.status()["message"]
        assert not where.exists()
        full.stop(flush=False)
    full.serve(is_restart=True)
    (mount / "nvme").rename(full.parent / "nvme")
    wait_for(lambda: full.status()["state"] == "open", "the disk")
    assert full.stage(KEYS)["num_blocks"] == 40


def test_a_directory_that_is_removed_is_not_written_to_for_ever(full, device, monkeypatch):
    monkeypatch.setattr(nvme_disk, "_LOOK_S", 0.05)
    (full.parent / "nvme").rename(full.parent / "elsewhere")
    wait_for(lambda: full.status()["state"] == "out")
    assert "mount" in full.status()["message"]
    (full.parent / "elsewhere").rename(full.parent / "nvme")
    wait_for(lambda: full.status()["state"] == "open")
    assert full.status()["recovered_blocks"] >= 40


def test_a_reserve_that_leaves_no_room_and_the_root_file_system_are_said(node, monkeypatch):
    (node.parent / "nvme").mkdir()
    root = os.stat("/")
    monkeypatch.setattr(nvme_tier.os, "stat", lambda _: root)
    full_disk = nvme_for(node.parent, spec=spec(free_reserve=2**60))
    reserve, place = nvme_tier._remarks(full_disk)
    assert "nvme.free_reserve (1048576TiB) leaves no room" in reserve
    assert "is on the root file system" in place
    monkeypatch.undo()
    elsewhere = nvme_for(node.parent, spec=spec(free_reserve=0), directory=Path("/dev/shm"))
    assert not list(nvme_tier._remarks(elsewhere))
