"""`kvray bench local` and `nvme`, as a user runs them: figures, errors, nothing left behind."""

import json
import math
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.store.machine.capacity import mount_of
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


_SHM = Path("/dev/shm")
QUICK = ("bench", "nvme", "--quick", "--repeat", "1", "--dir")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory where direct I/O reaches a disk."""
    path = Path(tempfile.mkdtemp(prefix="kvray-bench-disk-"))
    mount = mount_of(path)
    if mount is not None and mount.kind == "tmpfs":
        shutil.rmtree(path)
        pytest.skip(f"{path.parent} is kept in memory, which takes no direct I/O")
    yield path
    shutil.rmtree(path)


def leftovers(*directories: Path) -> list[str]:
    """Return what the bench has left in directories, and its mounts."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "kvray" in line]
    return mounts + [str(path) for one in directories for path in one.glob("kvray-bench-*")]


@pytest.fixture
def fio(tmp_path: Path) -> str:
    """A PATH with a fio that says that it moved 16 MiB in 10 ms, with half a core."""
    side = {"io_bytes": 2**24, "bw_bytes": 100 * 2**24}
    job = {"read": side, "write": side, "usr_cpu": 20, "sys_cpu": 30, "job_runtime": 10}
    path = tmp_path / "bin" / "fio"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho '{json.dumps({'jobs': [job]})}'\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


def test_a_quick_run_on_a_disk_gives_every_figure_and_leaves_nothing(
    run_kvray, disk, tmp_path, fio
):
    before = leftovers(_SHM, disk, tmp_path)
    done = run_kvray(*QUICK, disk, "--json", PATH=fio)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for end in ("", "_128kib"):
        for name in ("store", "store_full", "retrieve"):
            for figure in ("ratio", "gb_s", "cpu_s_per_gb"):
                assert 0 < found[f"nvme_{name}_{figure}{end}"] < math.inf
            assert found[f"nvme_{name}_floor_gb_s{end}"] == pytest.approx(1.6777)
            assert found[f"nvme_{name}_floor_cpu_s_per_gb{end}"] == pytest.approx(0.29802)
    assert found["page_bytes"] >= mmap.PAGESIZE
    assert found["pairs"] == 1
    assert found["block_bytes"] == [4 * 2**20, 128 * 2**10]
    assert leftovers(_SHM, disk, tmp_path) == before


def test_without_fio_kvray_is_measured_alone(run_kvray, disk, tmp_path):
    found = json.loads(run_kvray(*QUICK, disk, "--json", PATH=str(tmp_path)).stdout)
    assert found["fio"] is False
    assert found["nvme_retrieve_gb_s"] > 0
    assert not any("ratio" in name or "floor" in name for name in found)
    done = run_kvray(*QUICK, disk, "--block", "256KiB", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for words in ("store, 256KiB blocks", "retrieve, 256KiB", "s/GB", "Install fio"):
        assert words in done.stdout


def test_fio_that_fails_is_quoted_and_block_sizes_that_do_not_fit_are_refused(run_kvray, disk, fio):
    Path(fio.partition(":")[0], "fio").write_text("#!/bin/sh\necho no libaio here >&2; exit 1\n")
    done = run_kvray(*QUICK, disk, PATH=fio)
    assert done.returncode != 0
    assert "fio failed: no libaio here" in done.stderr
    for size in ("5000", "3MiB", "32MiB"):
        assert_refused(run_kvray(*QUICK, disk, "--block", size), "cannot be measured")


def test_interrupt_leaves_nothing_on_a_disk(disk, tmp_path):
    before = leftovers(_SHM, disk, tmp_path)
    args = ("bench", "nvme", "--quick", "--repeat", "5000", "--dir", disk)
    with running_kvray(*args, cwd=tmp_path, TMPDIR=str(tmp_path)) as process:
        segment = "kvray-bench-*/tier/segment-00000000"
        wait_for(lambda: process.poll() is not None or [*disk.glob(segment)], "its first file")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (130, "kvray: interrupted.\n")
    assert leftovers(_SHM, disk, tmp_path) == before
