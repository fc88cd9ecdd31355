"""A shard whose disk fails or hangs serves from its memory, says so, and takes the disk back."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard import nvme_disk, nvme_tier
from kvray.errors import TierError
from kvray.store.nvme import disk as disk_module
from tests.unit.actors.small_shard import failed_with, nvme_for, wait_until_serving
from tests.unit.actors.test_shard_nvme import Node, node  # noqa: F401 - a fixture
from tests.unit.store.mounted import run_mounted
from tests.unit.store.nvme.small_store import spec
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

KEYS = chain(40)


class Device:
    """The calls that move bytes, which can be made to fail or to hang."""

    def __init__(self) -> None:
        self.error = 0
        self.bad = ("preadv", "pwritev")
        self.answers = threading.Event()
        self.answers.set()
        self.num_hanging = 0

    def call(self, name: str, real: Any) -> Any:
        def act(*args: Any) -> Any:
            if name in self.bad and not self.answers.is_set():
                self.num_hanging += 1
                self.answers.wait(60)
            if name in self.bad and self.error:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args)

        return act


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(disk_module.os, name, made.call(name, getattr(os, name)))
    monkeypatch.setattr(nvme_disk, "_PAUSE_S", (0.1, 0.2))
    monkeypatch.setattr(nvme_tier, "_STALL_S", 0.2)
    yield made
    made.answers.set()


def has_on_disk(node: Node, num_blocks: int = 40) -> None:
    wait_until_serving(node.start())
    node.store(KEYS)
    wait_for(lambda: node.status()["demoted_blocks"] >= num_blocks)


def lose_from_memory(node: Node) -> None:
    serving = node.shard._require_serving()
    node.shard._loop.call(serving.owner.clear, 5.0)


def test_a_disk_that_fails_is_out_and_taken_back_with_all_that_it_has(node, device, caplog):
    has_on_disk(node)
    device.error = errno.EIO
    more = chain(40, seed="more")
    node.store(more)
    wait_for(lambda: node.status()["state"] == "out", "the disk's end")
    assert "cannot be written (Input/output error)" in node.status()["message"]
    assert "goes on without its disk" in caplog.text
    node.store(chain(20, seed="memory"))
    assert node.num_right(chain(20, seed="memory")) == 20
    device.error = 0
    wait_for(lambda: node.status()["state"] == "open", "the disk's return")
    assert node.status()["message"] == ""
    assert "its disk is back, with 40 blocks" in caplog.text
    lose_from_memory(node)
    assert node.stage(KEYS)["num_blocks"] == 40
    wait_for(lambda: node.line.matched(KEYS) == 40, "the announcement")


def test_what_a_disk_had_that_is_out_is_promised_to_no_other_node(node, device):
    has_on_disk(node)
    lose_from_memory(node)
    wait_for(lambda: node.line.matched(KEYS) == 40)
    device.error = errno.EIO
    for _ in range(nvme_tier._BAD_READS_MAX):
        node.stage(KEYS)
    wait_for(lambda: node.status()["state"] == "out")
    assert "read" in node.status()["message"]
    wait_for(lambda: node.line.matched(KEYS) == 0, "the withdrawal")
    device.error = 0
    wait_for(lambda: node.line.matched(KEYS) == 40, "the return")


def test_nothing_of_a_disk_that_is_out_stays_open(node, device):
    has_on_disk(node)
    device.error = errno.EIO
    node.store(chain(40, seed="more"))
    wait_for(lambda: node.status()["state"] == "out")

    def open_there() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return [path for path in found if str(node.parent / "nvme" / "segment") in path]

    wait_for(lambda: not open_there(), "the end of its files")


def test_a_disk_that_hangs_holds_up_one_request_and_then_nobody(node, device, caplog):
    has_on_disk(node)
    lose_from_memory(node)
    device.answers.clear()
    assert node.stage(KEYS)["num_blocks"] == 0
    assert "does not answer" in node.status()["message"]
    began = time.monotonic()
    for _ in range(20):
        answer = node.stage(KEYS)
        assert (answer["num_blocks"], answer["reason"]) == (0, "too_slow")
    assert time.monotonic() - began < 4.0
    assert device.num_hanging <= 6, "no more threads than there are for reads"
    device.answers.set()
    wait_for(lambda: node.stage(KEYS)["num_blocks"] == 40, "the disk's return")
    wait_for(lambda: node.status()["message"] == "")
    assert "answers again" in caplog.text


def test_a_shard_with_a_disk_that_hangs_can_be_cleared_flushed_and_ended(node, device, monkeypatch):
    monkeypatch.setattr(nvme_tier, "_HUNG_S", 0.3)
    monkeypatch.setattr(nvme_disk, "_CLOSE_S", 0.3)
    has_on_disk(node)
    device.answers.clear()
    node.store(chain(40, seed="more"))
    wait_for(lambda: device.num_hanging)
    wait_for(lambda: "has not answered a write" in node.status()["message"])
    shard = node.shard
    with pytest.raises(TierError, match="does not answer"):
        shard.clear(0.2)
    began = time.monotonic()
    node.stop(flush=True)
    assert time.monotonic() - began < 5.0
    assert not (node.parent / "shm").exists()


def test_a_disk_that_hangs_at_the_start_keeps_the_shard_from_nothing(node, device, monkeypatch):
    monkeypatch.setattr(nvme_disk, "_START_S", 0.3)
    has_on_disk(node)
    node.stop(flush=True)
    device.answers.clear()
    wait_until_serving(node.start())
    assert node.status()["state"] == "out"
    assert "does not answer" in node.status()["message"]
    device.answers.set()
    wait_for(lambda: node.status()["state"] == "open", "the disk")
    assert node.stage(KEYS)["num_blocks"] == 40


def test_a_shard_starts_over_a_disk_that_has_become_read_only():
    printed = run_mounted(
        """
import subprocess
from kvray.actors.shard import nvme_disk
from tests.unit.actors.small_shard import wait_for, wait_until_serving
from tests.unit.actors.test_shard_nvme import Node
from tests.unit.store.small_arena import chain

nvme_disk._PAUSE_S = (0.1, 0.2)
disk, keys = mounted / "disk", chain(20)
(mounted / "shm").mkdir()
disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
node = Node(mounted)
wait_until_serving(node.start(directory=disk / "tier"))
node.store(keys)
node.stop(flush=True)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
(mounted / "shm").mkdir(exist_ok=True)
wait_until_serving(node.start(directory=disk / "tier"))
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


def test_a_missing_parent_is_refused_and_nothing_is_made(node):
    message = failed_with(node.start(directory=node.parent / "mnt" / "nvme" / "kvray-x"))
    assert "does not exist; mount the disk, or correct nvme.dir" in message
    assert not (node.parent / "mnt").exists()


def test_the_last_directory_is_made(node):
    wait_until_serving(node.start(directory=node.parent / "nvme" / "kvray-x"))
    assert (node.parent / "nvme" / "kvray-x").is_dir()


def test_a_directory_that_has_gone_since_is_a_disk_that_is_out(node, device):
    has_on_disk(node)
    node.stop(flush=True)
    mount = node.parent / "mnt"
    mount.mkdir()
    (node.parent / "nvme").rename(mount / "nvme")
    for where in (node.parent / "nvme", node.parent / "none" / "nvme" / "kvray-x"):
        wait_until_serving(node.start(is_restart=True, directory=where))
        assert "mount" in node.status()["message"]
        assert not where.exists()
        node.stop(flush=False)
        (node.parent / "shm").mkdir(exist_ok=True)
    wait_until_serving(node.start(is_restart=True))
    (mount / "nvme").rename(node.parent / "nvme")
    wait_for(lambda: node.status()["state"] == "open", "the disk")
    assert node.stage(KEYS)["num_blocks"] == 40


def test_a_directory_that_is_removed_is_not_written_to_for_ever(node, device, monkeypatch):
    monkeypatch.setattr(nvme_disk, "_LOOK_S", 0.05)
    has_on_disk(node)
    (node.parent / "nvme").rename(node.parent / "elsewhere")
    wait_for(lambda: node.status()["state"] == "out")
    assert "mount" in node.status()["message"]
    (node.parent / "elsewhere").rename(node.parent / "nvme")
    wait_for(lambda: node.status()["state"] == "open")
    assert node.status()["recovered_blocks"] >= 40


def test_a_reserve_that_leaves_no_room_and_the_root_file_system_are_said(node, monkeypatch):
    settings = disk_settings(node.parent, free_reserve=2**60)
    (node.parent / "nvme").mkdir()
    root = os.stat("/")
    monkeypatch.setattr(nvme_tier.os, "stat", lambda _: root)
    reserve, place = nvme_tier._remarks(settings)
    assert "nvme.free_reserve (1048576TiB) leaves no room" in reserve
    assert "is on the root file system" in place
    monkeypatch.undo()
    where = Path("/dev/shm")
    assert not list(nvme_tier._remarks(disk_settings(where, directory=where)))


def disk_settings(parent: Path, *, free_reserve: int = 0, **changes: Any) -> Any:
    return nvme_for(parent, spec=spec(free_reserve=free_reserve), **changes)
