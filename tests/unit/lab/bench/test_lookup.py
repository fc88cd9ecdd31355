"""`kvray bench lookup`, as a user runs it: figures, errors, and an end by Ctrl-C."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forks import RunKvray
from tests.waiting import HANG_S

pytestmark = pytest.mark.long

FILLING_BYTES = 400 * 2**20
"""Memory of a process that has begun to fill an index: far more than what it imports."""


def test_small_run_gives_every_figure(run_kvray: RunKvray) -> None:
    done = run_kvray("bench", "lookup", "--entries", "50000", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    for name in ("match", "match_warm", "locate", "announce", "purge"):
        median, p99 = found[f"lookup_{name}_ms"], found[f"lookup_{name}_ms_p99"]
        assert 0 < median <= p99 <= found[f"lookup_{name}_ms_max"] < math.inf
    assert found["lookup_drop_ms"] > 0
    assert found["lookup_bytes_per_entry"] > 32
    assert found["lookup_bytes_per_entry_2_holders"] > 32
    assert found["purge_heartbeats"] > 0
    assert found["entries"] == 40_000, "whole announcements"


def test_run_without_json_prints_a_table(run_kvray: RunKvray) -> None:
    done = run_kvray("bench", "lookup", "--entries", "20000")
    assert done.returncode == 0, done.stderr
    for words in ("match of 4,096 keys", "99th percentile", "20,000 entries"):
        assert words in done.stdout
    assert "target" not in done.stdout


def test_too_few_entries_are_refused(run_kvray: RunKvray) -> None:
    done = run_kvray("bench", "lookup", "--entries", "19999")
    assert done.returncode == 2
    assert "20000" in done.stderr


def test_interrupt_ends_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvray", "bench", "lookup", "--entries", "50000000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while psutil.Process(process.pid).memory_info().rss < FILLING_BYTES:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert stderr == "kvray: interrupted.\n"
