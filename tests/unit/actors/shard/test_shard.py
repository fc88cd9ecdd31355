import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.loop_thread import LoopThread
from kvray.actors.shard.shard import Shard
from kvray.actors.staging import replicas as replicas_module
from kvray.errors import ConfigError, ShardUnavailable
from kvray.node.stage_calls import ShardSocket
from kvray.store import ArenaOwner, ArenaSpec
from kvray.store.arena import file as arena_file
from kvray.store.arena.layout import RUN_SLOTS
from tests.unit.actors.small_shard import (
    NAMESPACE,
    WAIT_S,
    failed_with,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import chain, served, spec, store
from tests.waiting import HANG_S, wait_for


@pytest.mark.parametrize("is_full", [False, True])
def test_smaller_blocks_wait_for_their_rows(make_shard, attach, monkeypatch, caplog, is_full):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("kvray.store.arena.layout.FIRST_ROWS", 1)
    make_shard(spec=spec(num_slabs=40, slots_per_slab=4 * RUN_SLOTS))
    arena = attach()
    if is_full:  # no mock: it would keep its arguments, and so the arena mapped
        monkeypatch.setattr(arena_file, "populate", _no_memory)
    assert store(arena, chain(4)).dropped == 4
    wait_for(lambda: "smaller" in caplog.text)
    assert len(store(arena, chain(4)).slots) == (0 if is_full else 4)
    said = [one.levelname for one in caplog.records if "smaller" in one.message]
    assert said == ["WARNING" if is_full else "INFO"]


def _no_memory(*_pieces: object, **_options: object) -> bool:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- the shard's own life -------------------------------------------------------------------------


@pytest.mark.parametrize(("retire", "left"), [(True, None), (False, {"arena", "lock", "owner"})])
def test_stop_leaves_arena_and_locks_only_and_nothing_if_it_retires(shard, directory, retire, left):
    shard.stop(retire=retire, timeout_s=5)
    shard.stop(retire=retire, timeout_s=5)
    with pytest.raises(ShardUnavailable, match="is stopped"):
        shard.clear(timeout_s=1)
    assert directory.exists() == (left is not None)
    assert left is None or {path.name.partition(".")[0] for path in directory.iterdir()} == left


def test_stop_ends_a_shard_that_prepares_its_arena(start_shard, directory, monkeypatch):
    reached = threading.Event()
    progress = Shard._preparing

    def slow(shard: Shard, done: int, total: int) -> None:
        reached.set()
        wait_for(shard._stopping.is_set)
        progress(shard, done, total)

    monkeypatch.setattr(Shard, "_preparing", slow)
    shard = start_shard()
    assert reached.wait(HANG_S)
    shard.stop(retire=True, timeout_s=5)
    assert list(directory.parent.iterdir()) == []


def test_a_defect_in_the_loop_is_logged_and_reported(make_shard, directory, monkeypatch, caplog):
    crashed = threading.Event()
    shard = make_shard(crashed=crashed.set)
    monkeypatch.setattr(ArenaOwner, "bury_dead", lambda *_, **__: 1 // 0)
    assert crashed.wait(HANG_S)
    assert "ZeroDivisionError" in caplog.text
    assert shard.status()["state"] == "failed"
    assert (directory / "arena").exists(), "who is started next adopts it"
    assert not (directory / "socket").exists()


def test_what_is_under_way_when_the_loop_ends_is_cancelled():
    tasks: list[asyncio.Task[Any]] = []
    has_ended = threading.Event()

    async def main() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(HANG_S), name="begun"))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(asyncio.sleep(HANG_S), name="not begun"))

    thread = LoopThread("the loop", main, lambda failure: has_ended.set())
    thread.start()
    assert thread.join(HANG_S)
    assert has_ended.is_set()
    assert [task.cancelled() for task in tasks] == [True, True]


def test_a_start_that_is_taken_back_removes_its_own_arena_only(make_shard, attach, directory):
    make_shard().stop(retire=True, only_new=True, timeout_s=WAIT_S)
    assert not directory.exists()
    make_shard().stop(retire=False, timeout_s=WAIT_S)
    with contextlib.closing(open_arena(directory)) as arena:
        store(arena, (keys := chain(3)))
    make_shard().stop(retire=True, only_new=True, timeout_s=WAIT_S)
    make_shard()
    assert served(attach(), keys) == 3


# -- regular work ---------------------------------------------------------------------------------


def test_blocks_of_another_process_are_announced_and_its_leases_end_with_it(shard, child, line):
    holder = child()
    holder.say("arena.join('engine')")
    holder.say("small.store(arena, small.chain(4)) and None")
    wait_for(lambda: line.matched(chain(4)) == 4)
    holder.say("arena.lease(small.chain(4))")
    assert shard.status()["arena"]["leased_blocks"] == 4
    holder.kill()
    wait_for(lambda: shard.status()["arena"]["leased_blocks"] == 0)
    assert shard.clear(timeout_s=5) == 4


def test_a_share_of_the_slots_is_kept_free_under_a_writer(make_shard, attach):
    shard = make_shard(free_target=0.25, announce_s=0.005)
    arena = attach()
    for n in range(40):
        store(arena, chain(4, seed=str(n)))
        wait_for(lambda: shard.status()["arena"]["blocks"] <= 52, "evicting ahead")
    assert shard.status()["arena"]["dropped"] == 0


@pytest.mark.parametrize("stopped_s", [30.0, 0.02])
def test_who_stopped_with_the_lock_is_shown_and_ended_in_time(make_shard, child, stopped_s):
    shard = make_shard(stopped_s=stopped_s, heartbeat_s=0.02)
    other = child()
    assert other.say("small.acquire(arena._lock, 10)") == "True"
    other.stop()
    if stopped_s > 1:
        wait_for(lambda: shard.status().get("stopped_with_lock", {}).get("pid") == other.pid)
        other.go_on()
        other.say("small.release(arena._lock)")
    else:
        other.wait_until_killed()
    wait_for(lambda: "stopped_with_lock" not in shard.status())


def test_a_long_lease_is_named_once(make_shard, attach, caplog):
    make_shard(lease_warn_s=0.05, heartbeat_s=0.02)
    arena, keys = attach(), chain(2)
    store(arena, keys)
    assert arena.lease(keys)
    wait_for(lambda: "has leased 2 slots for long" in caplog.text)
    time.sleep(0.2)
    assert caplog.text.count("for long") == 1


# -- bad surroundings -----------------------------------------------------------------------------


def link_to_precious(directory: Path) -> None:
    target = directory.parent / "precious"
    target.mkdir()
    directory.symlink_to(target)


def give_away(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 12345, 12345)


@pytest.mark.parametrize(
    "make",
    [
        link_to_precious,
        pytest.param(
            give_away, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives one away")
        ),
    ],
)
def test_a_link_or_another_users_directory_is_refused_and_left_alone(start_shard, directory, make):
    make(directory)
    (directory / "arena").touch()
    shard = start_shard()
    assert "belongs to another user or is a link" in failed_with(shard)
    shard.stop(retire=True, timeout_s=5)
    assert not sweep(directory)
    assert [path.name for path in directory.iterdir()] == ["arena"]


HUGE = ArenaSpec(cluster_name="test", capacity=2**44, slab=2**36, slot_min=2**30, holders_max=8)


@pytest.mark.parametrize(
    ("where", "changes", "fix"),
    [
        ("kvray-test", {"spec": HUGE}, "lower arena.capacity"),
        ("/proc/nowhere/kvray-test", {}, "set arena.dir to a tmpfs that this user may write to"),
        ("file", {}, "cannot be made"),
        ("x" * 90, {}, "longer than 107 bytes; choose a shorter arena.dir or cluster_name."),
    ],
    ids=["larger than the mount", "no such directory", "a file there", "a socket path too long"],
)
def test_an_impossible_arena_leaves_nothing(start_shard, directory, where, changes, fix):
    (directory.parent / "file").touch()
    assert fix in failed_with(start_shard(directory=directory.parent / where, **changes))
    wait_for(lambda: [path.name for path in directory.parent.iterdir()] == ["file"])


def test_a_locked_arena_is_waited_for(shard, start_shard, child, monkeypatch, caplog):
    monkeypatch.setattr("kvray.store.arena.arena._PATIENT_S", 0.1)
    shard.stop(retire=False, timeout_s=5)
    process = child()
    assert process.say("small.acquire(arena._lock, 1)") == "True"
    second = start_shard()
    wait_for(lambda: "stays locked" in caplog.text)
    assert (second.is_starting, second.status()["state"]) == (True, "starting")
    process.kill()
    wait_until_serving(second)
    assert not second.is_starting


def test_what_ended_long_ago_is_added_up_while_a_shard_serves(shard, directory, monkeypatch):
    monkeypatch.setattr(replicas_module, "ENDED_S", 0.2)
    rank = {"timeout_s": WAIT_S, "replica": "r", "rank": 0}
    with contextlib.closing(ShardSocket(directory)) as engine:
        engine.call("register", **rank, namespace=NAMESPACE.to_wire())
        engine.call("report", **rank, counters={"requests": 3})
    wait_for(lambda: shard.status()["ended"] == {"ranks": 1, "counters": {"requests": 3}})
    assert shard.status()["replicas"] == []


def test_a_shard_whose_settings_cannot_be_used_says_so_and_makes_nothing(tmp_path):
    crashes: list[str] = []
    shard = Shard("a", settings_for(tmp_path / "node"), crashed=lambda: crashes.append("it"))
    with pytest.raises(ShardUnavailable, match="is starting"):
        shard.clear(timeout_s=1)
    shard.refuse(ConfigError("On this node: no."))
    said = {"state": "failed", "error": "ConfigError", "message": "On this node: no."}
    assert said.items() <= shard.status().items()
    shard.stop(retire=True, timeout_s=5)
    assert (crashes, list(tmp_path.iterdir())) == ([], [])
