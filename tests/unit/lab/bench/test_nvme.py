"""`kvray bench nvme`, as a user runs it: figures, refusals, and nothing that is left behind."""

import json
import math
import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.store.machine.capacity import mount_of
from tests.forks import assert_refused, running_kvray
from tests.waiting import HANG_S, wait_for

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


def test_quick_run_gives_every_figure_and_leaves_nothing(run_kvray, disk, tmp_path, fio):
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


@pytest.mark.parametrize("options", [["--json"], ["--block", "256KiB"]])
def test_without_fio_kvray_is_measured_alone(run_kvray, disk, tmp_path, options):
    done = run_kvray(*QUICK, disk, *options, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    if options == ["--json"]:
        found = json.loads(done.stdout)
        assert found["fio"] is False
        assert found["nvme_retrieve_gb_s"] > 0
        assert not any("ratio" in name or "floor" in name for name in found)
    else:
        for words in ("store, 256KiB blocks", "retrieve, 256KiB", "s/GB", "Install fio"):
            assert words in done.stdout


def test_fio_that_fails_is_quoted(run_kvray, disk, fio):
    Path(fio.partition(":")[0], "fio").write_text("#!/bin/sh\necho no libaio here >&2; exit 1\n")
    done = run_kvray(*QUICK, disk, PATH=fio)
    assert done.returncode != 0
    assert "fio failed: no libaio here" in done.stderr


@pytest.mark.parametrize("size", ["5000", "3MiB", "32MiB"])
def test_block_size_that_does_not_fit_is_refused(run_kvray, disk, size):
    assert_refused(run_kvray(*QUICK, disk, "--block", size), "cannot be measured")


def test_interrupt_leaves_nothing(disk, tmp_path):
    before = leftovers(_SHM, disk, tmp_path)
    args = ("bench", "nvme", "--quick", "--repeat", "5000", "--dir", disk)
    with running_kvray(*args, cwd=tmp_path, TMPDIR=str(tmp_path)) as process:
        segment = "kvray-bench-*/tier/segment-00000000"
        wait_for(lambda: process.poll() is not None or [*disk.glob(segment)], "its first file")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (130, "kvray: interrupted.\n")
    assert leftovers(_SHM, disk, tmp_path) == before
