"""`kvray bench nvme`, as a user runs it: figures, refusals, and nothing that is left behind."""

import json
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import KVRayError
from kvray.lab.bench.nvme import BareDisk, Transfers, check_cold, resident_bytes
from kvray.store.machine.capacity import mount_of
from kvray.store.nvme.disk import aligned
from tests.waiting import HANG_S

_SHM = Path("/dev/shm")
_SIZE = 2**20


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


def test_quick_run_gives_every_figure_and_leaves_nothing(run_kvray, disk, tmp_path):
    before = leftovers(_SHM, disk, tmp_path)
    done = run_kvray("bench", "nvme", "--quick", "--repeat", "1", "--dir", disk, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pages = ("",) if found["no_huge_pages"] else ("", "_huge")
    for end in [block + suffix for block in ("", "_128kib") for suffix in pages]:
        for name in ("store", "store_full", "retrieve"):
            for figure in ("ratio", "gb_s", "floor_gb_s", "cpu_s_per_gb", "floor_cpu_s_per_gb"):
                assert 0 < found[f"nvme_{name}_{figure}{end}"] < math.inf
        assert 0 < found[f"nvme_cpu_s_per_gb{end}"] < math.inf
    assert found["page_bytes"] >= mmap.PAGESIZE
    assert found["direct"] is True
    assert found["pairs"] == 1
    assert found["block_bytes"] == [4 * 2**20, 128 * 2**10]
    assert leftovers(_SHM, disk, tmp_path) == before


def test_run_without_json_prints_a_table(run_kvray, disk):
    done = run_kvray(
        "bench", "nvme", "--quick", "--repeat", "1", "--dir", disk, "--block", "256KiB"
    )
    assert done.returncode == 0, done.stderr
    for words in ("store, 256KiB blocks", "retrieve, 256KiB", "s/GB", "Bare with"):
        assert words in done.stdout
    assert "target" not in done.stdout


def test_directory_in_memory_is_refused(run_kvray):
    done = run_kvray("bench", "nvme", "--quick", "--dir", _SHM)
    assert (done.returncode, done.stdout) == (2, "")
    assert "kept in memory (tmpfs)" in done.stderr
    assert "--dir" in done.stderr
    assert done.stderr.count("\n") == 1


def test_directory_that_is_not_there_is_refused(run_kvray, tmp_path):
    done = run_kvray("bench", "nvme", "--quick", "--dir", tmp_path / "none")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No such file" in done.stderr


def test_block_size_that_does_not_fit_is_refused(run_kvray, disk):
    for size in ("5000", "3MiB", "32MiB"):
        done = run_kvray("bench", "nvme", "--quick", "--dir", disk, "--block", size)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "cannot be measured" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(disk, tmp_path, signum):
    before = leftovers(_SHM, disk, tmp_path)
    with subprocess.Popen(
        f"{sys.executable} -m kvray bench nvme --quick --repeat 5000 --dir {disk}".split(),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not list(disk.glob("kvray-bench-*/tier/segment-00000000")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert stderr == "kvray: interrupted.\n"
    assert leftovers(_SHM, disk, tmp_path) == before


def test_floor_moves_every_byte(disk):
    memory = aligned(_SIZE + 4096)
    wanted = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype="u1")
    floor = BareDisk(disk / "floor", memory)
    for size, threads in ((4096, 1), (3 * 4096, 3), (2 * _SIZE, 1)):
        transfers = Transfers(num_bytes=size, num_threads=threads)
        memory[:] = wanted
        floor.renew()
        floor.store(transfers)
        assert (np.fromfile(floor.path, dtype="u1") == wanted).all()
        memory[:] = 0
        floor.retrieve(transfers)
        assert (memory == wanted).all()
    floor.close()
    floor.close()
    assert not list(disk.iterdir())


def test_floor_of_little_memory_has_a_fastest_way(disk):
    memory = aligned(_SIZE)
    memory[:] = 1
    floor = BareDisk(disk / "floor", memory)
    assert floor.fastest()[0].num_bytes == _SIZE
    floor.close()


def test_what_the_page_cache_has_is_seen_and_put_out(disk):
    path = disk / "file"
    path.write_bytes(bytes(_SIZE))
    with path.open("r+b") as file:
        assert resident_bytes(file.fileno()) == _SIZE
        os.fsync(file.fileno())
        check_cold([path])
        assert resident_bytes(file.fileno()) == 0


def test_file_that_stays_in_the_page_cache_is_refused(disk):
    path = disk / "file"
    path.write_bytes(bytes(_SIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), _SIZE) as mapping:
        mapping[0] = 1  # what is mapped cannot be put out
        with pytest.raises(KVRayError, match="still in the page cache"):
            check_cold([path])
