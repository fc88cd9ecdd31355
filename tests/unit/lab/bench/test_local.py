"""`kvray bench local --quick`, as a user runs it: figures, errors, nothing left behind."""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forks import assert_refused, running_kvray
from tests.waiting import HANG_S, wait_for

FIGURES = (
    *("store_ratio_4mib", "store_ratio_128kib", "first_store_gb_s", "store_full_ratio_4mib"),
    *("retrieve_ratio_4mib", "retrieve_ratio_128kib", "retrieve4_ratio_4mib"),
    *("retrieve_verified_ratio_4mib", "retrieve_cpu_s_per_gb"),
    *("lookup_8k_ms_p50", "lookup_8k_ms_p99", "lookup_128k_ms_p50"),
    *("lookup_8k_over_hash", "lookup_128k_over_hash"),
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


@contextmanager
def running_bench(tmp_path: Path, arena_dir: Path) -> Iterator[tuple[Any, list[psutil.Process]]]:
    """Have a quick run with many pairs, which the test ends; give its process and workers."""
    args = ("bench", "local", "--quick", "--repeat", "100000")
    with running_kvray(*args, cwd=tmp_path, KVRAY_ARENA__DIR=str(arena_dir)) as process:
        wait_for(lambda: [*arena_dir.glob("kvray-bench-*/arena")], "the arena")
        yield process, psutil.Process(process.pid).children()


@pytest.mark.parametrize(("signum", "after_s"), [(signal.SIGINT, 1.0), (signal.SIGTERM, 0.0)])
def test_interrupt_leaves_nothing(tmp_path, arena_dir, signum, after_s):
    with running_bench(tmp_path, arena_dir) as (process, workers):
        time.sleep(after_s)
        assert len(workers) == 5
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (130, "kvray: interrupted.\n")
    assert list(arena_dir.iterdir()) == []
    assert not any(one.is_running() for one in workers)


def test_workers_end_with_a_parent_that_is_killed(tmp_path, arena_dir):
    with running_bench(tmp_path, arena_dir) as (process, workers):
        process.kill()
    wait_for(lambda: not any(one.is_running() for one in workers), "their end")


def test_missing_arena_directory_is_named(run_kvray, tmp_path):
    done = run_kvray("bench", "local", KVRAY_ARENA__DIR=str(tmp_path / "nowhere"))
    assert_refused(done, "nowhere", "arena.dir")
