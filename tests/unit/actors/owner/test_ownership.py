"""Whose a directory is, and what is removed from it."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from kvray.actors.owner.ownership import OWNER_FILE, sweep
from kvray.actors.shard.shard import Shard
from kvray.store.machine.side_file import OWNER_BYTE
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.shard_process import ShardProcess
from tests.unit.actors.small_shard import open_arena, wait_until_serving

LOCK_OWNER = f"""
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, {OWNER_BYTE})
except OSError:
    sys.exit(1)
"""


def is_locked_for_others(directory: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", LOCK_OWNER, str(directory / OWNER_FILE)], check=False, timeout=30
    )
    return done.returncode == 1


def test_the_owner_lock_excludes_other_processes(shard: Shard, directory: Path) -> None:
    assert is_locked_for_others(directory)


def test_who_waited_for_an_owner_that_removed_its_files_gets_new_ones(
    make_shard: StartShard, directory: Path
) -> None:
    first = make_shard()
    wait_until_serving(first)
    second = make_shard("b")
    time.sleep(0.15)
    first.stop(retire=True, timeout_s=5)
    wait_until_serving(second)
    assert is_locked_for_others(directory), "its lock is on a file without a name"


def test_sweep_leaves_an_owned_directory_alone(shard: Shard, directory: Path) -> None:
    assert not sweep(directory)
    assert shard.status()["state"] == "serving"
    assert (directory / "arena").exists()


def test_sweep_removes_what_a_dead_shard_left(older: ShardProcess, directory: Path) -> None:
    assert not sweep(directory)
    older.kill()
    older.wait()
    with contextlib.closing(open_arena(directory)) as arena:
        assert sweep(directory)
        assert arena.retired
    assert list(directory.parent.iterdir()) == []


def test_sweep_of_nothing_finds_nothing_left(directory: Path) -> None:
    assert sweep(directory)


def test_sweep_leaves_files_of_others(directory: Path) -> None:
    directory.mkdir()
    (directory / "precious").touch()
    assert not sweep(directory)
    assert [path.name for path in directory.iterdir()] == ["precious"]
