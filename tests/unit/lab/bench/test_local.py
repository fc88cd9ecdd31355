"""`kvray bench local --quick`, as a user runs it: figures, errors, nothing left behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.waiting import HANG_S

FIGURES = (
    "store_ratio_4mib",
    "retrieve_ratio_4mib",
    "retrieve4_ratio_4mib",
    "store_ratio_128kib",
    "retrieve_ratio_128kib",
    "first_store_gb_s",
    "lookup_8k_ms_p50",
    "lookup_8k_ms_p99",
    "lookup_128k_ms_p50",
    "lookup_8k_over_hash",
    "lookup_128k_over_hash",
    "retrieve_verified_ratio_4mib",
    "store_full_ratio_4mib",
    "retrieve_cpu_s_per_gb",
)


@pytest.fixture
def arena_dir(tmp_path: Path) -> Path:
    """A directory for the bench's arena that is empty before and after."""
    directory = tmp_path / "arenas"
    directory.mkdir()
    return directory


def test_quick_run_gives_every_figure(run_kvray, arena_dir):
    done = run_kvray("bench", "local", "--quick", "--json", KVRAY_ARENA__DIR=str(arena_dir))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert all(math.isfinite(found[name]) and found[name] > 0 for name in FIGURES)
    assert found["lookup_8k_ms_p50"] <= found["lookup_8k_ms_p99"]
    assert (found["blocks_4mib"], found["blocks_128kib"]) == (16, 32)
    assert list(arena_dir.iterdir()) == []


@pytest.mark.parametrize(("signum", "after_s"), [(signal.SIGINT, 1.0), (signal.SIGTERM, 0.0)])
def test_interrupt_leaves_nothing(tmp_path, arena_dir, signum, after_s):
    with _running(tmp_path, arena_dir) as process:
        _wait_for(arena_dir, "kvray-bench-*/arena")
        time.sleep(after_s)
        workers = _children_of(process.pid)
        assert len(workers) == 5
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert stderr == "kvray: interrupted.\n"
    assert list(arena_dir.iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_workers_end_with_a_parent_that_is_killed(tmp_path, arena_dir):
    with _running(tmp_path, arena_dir) as process:
        _wait_for(arena_dir, "kvray-bench-*/arena")
        workers = _children_of(process.pid)
        process.kill()
        process.communicate(timeout=HANG_S)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--capacity", "much"], ["--capacity", "64GiB"]),
        (["--capacity", "1MiB"], ["--capacity 1MiB is too small", "64MiB"]),
        (["--capacity", "4096TiB"], ["TiB", "smaller --capacity, or --quick"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(run_kvray, arena_dir, args, words):
    done = run_kvray("bench", "local", *args, KVRAY_ARENA__DIR=str(arena_dir))
    assert done.returncode == 2
    assert done.stderr.startswith("kvray: ")
    assert done.stderr.count("\n") == 1, "one sentence"
    for word in words:
        assert word in done.stderr
    assert list(arena_dir.iterdir()) == []


def test_missing_arena_directory_is_named(run_kvray, tmp_path):
    done = run_kvray("bench", "local", KVRAY_ARENA__DIR=str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "arena.dir" in done.stderr


@contextmanager
def _running(tmp_path: Path, arena_dir: Path) -> "Iterator[subprocess.Popen[str]]":
    """A quick run with many pairs, which the test ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvray", "bench", "local", "--quick", "--repeat", "100000"],
        env={**os.environ, "KVRAY_ARENA__DIR": str(arena_dir)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for(directory: Path, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not list(directory.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
