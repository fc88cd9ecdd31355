"""`kvray bench connector --quick`, as a user runs it: figures, errors, and nothing left behind."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forks import RunKvray
from tests.waiting import HANG_S

pytestmark = pytest.mark.long

CASES = (
    *("", "_1k", "_128k", "_tp2", "_tp4", "_tp8", "_verified", "_batch"),
    *("_beside_work", "_contended", "_miss"),
)
PARTS = ("match", "plan", "finish", "pickle", "load")
PATIENT_S = "0.5"
"""Longest try for the lock, so that a busy machine makes no miss."""


@pytest.fixture
def arena_dir() -> Iterator[Path]:
    """A directory for the bench's arena, empty before and after; sockets want a short name."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield directory
    directory.rmdir()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of one quick run."""
    directory = tmp_path_factory.mktemp("arenas")
    done = subprocess.run(
        [sys.executable, "-m", "kvray", "bench", "connector", "--quick", "--json"],
        env={
            **os.environ,
            "KVRAY_ARENA__DIR": str(directory),
            "KVRAY_ARENA__LOCK_WAIT_S": PATIENT_S,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(directory.iterdir()) == []
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_quick_run_gives_every_figure(found: dict[str, Any]) -> None:
    for case in CASES:
        p50, p99 = found[f"leader{case}_ms_p50"], found[f"leader{case}_ms_p99"]
        assert 0 < p50 <= p99 < math.inf
        assert found[f"leader{case}_over_hash"] > 0
    assert all(found[f"leader_{part}_ms_p50"] > 0 for part in PARTS)
    assert found["requests"] == 10


def test_all_that_was_stored_is_found_again(found: dict[str, Any]) -> None:
    missed = found["missed_requests"]
    assert all(missed[f"leader{case}"] == 0 for case in CASES if case != "_contended")


def test_metadata_is_at_most_eight_bytes_for_a_block_and_rank(found: dict[str, Any]) -> None:
    blocks = 8192 // 32
    worst = max(found["metadata_bytes_load"], found["metadata_bytes_save"])
    assert 4 * blocks < worst <= 8 * blocks
    assert found["metadata_bytes_per_block_rank"] == pytest.approx(worst / blocks, rel=1e-4)
    assert found["metadata_bytes_empty"] < found["metadata_bytes_one_block"] < 400


@pytest.mark.parametrize("block", ["much", "1000"])
def test_block_that_no_pool_has_is_refused(
    run_kvray: RunKvray, arena_dir: Path, block: str
) -> None:
    done = run_kvray("bench", "connector", "--block", block, KVRAY_ARENA__DIR=str(arena_dir))
    assert done.returncode == 2
    assert "--block" in done.stderr
    assert done.stderr.count("\n") == 1, "one sentence"


def test_interrupt_leaves_nothing(tmp_path: Path, arena_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvray", "bench", "connector"],
        env={**os.environ, "KVRAY_ARENA__DIR": str(arena_dir)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not list(arena_dir.glob("kvray-bench-*/*/arena")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert stderr == "kvray: interrupted.\n"
    assert not psutil.pid_exists(process.pid)
