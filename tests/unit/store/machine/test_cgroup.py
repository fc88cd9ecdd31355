"""The cgroups of a process, of both versions, nested and real; and the mounts of a machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.store.machine.capacity import Mount, limiting_cgroups, mount_of, mounts

GIB = 2**30


def mounted(point: Path, *, kind: str = "cgroup2", root: str = "/", options: str = "rw") -> Mount:
    return Mount(point=point, kind=kind, device="0:1", root=root, options=tuple(options.split(",")))


def fill(directory: Path, limit: str, usage: int = GIB, *, idle: int = 0, active: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    stat = f"anon 1\ninactive_file {idle}\nactive_file {active}\n"
    (directory / "memory.stat").write_text(stat)


def fill_v1(directory: Path, limit: int, usage: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text("cache 1\ntotal_inactive_file 7\n")


def test_own_cgroup_and_those_around_it_count(tmp_path: Path) -> None:
    fill(tmp_path / "slice" / "own", str(2 * GIB))
    fill(tmp_path / "slice", str(3 * GIB))
    fill(tmp_path / "other", str(GIB))
    found = limiting_cgroups("0::/slice/own\n", [mounted(tmp_path)])
    assert [cgroup.limit for cgroup in found] == [2 * GIB, 3 * GIB]
    assert [cgroup.is_root for cgroup in found] == [False, False]


def test_cgroup_of_a_container_is_the_root_of_what_it_sees(tmp_path: Path) -> None:
    fill(tmp_path, str(2 * GIB), idle=3, active=4)
    (cgroup,) = limiting_cgroups("0::/\n", [mounted(tmp_path)])
    assert (cgroup.is_root, cgroup.left) == (True, GIB + 3)
    assert (cgroup.idle_cache, cgroup.active_cache) == (3, 4)


@pytest.mark.parametrize("own", ["/docker/abc/inner", "/docker/abc"])
def test_path_is_that_below_what_is_mounted(tmp_path: Path, own: str) -> None:
    fill(tmp_path, str(4 * GIB))
    fill(tmp_path / "inner", "max")
    (cgroup,) = limiting_cgroups(f"0::{own}\n", [mounted(tmp_path, root="/docker/abc")])
    assert cgroup.limit == 4 * GIB


@pytest.mark.parametrize(("own", "root"), [("/elsewhere", "/docker/abc"), ("/../x", "/")])
def test_cgroup_outside_of_what_is_mounted_leaves_the_mount_s(
    tmp_path: Path, own: str, root: str
) -> None:
    fill(tmp_path, str(4 * GIB))
    (cgroup,) = limiting_cgroups(f"0::{own}\n", [mounted(tmp_path, root=root)])
    assert cgroup.limit == 4 * GIB


def test_version_1_counts_where_its_controller_is_memory(tmp_path: Path) -> None:
    fill_v1(tmp_path / "memory" / "job", 2 * GIB, GIB)
    fill_v1(tmp_path / "memory", 9223372036854771712, GIB)
    fill_v1(tmp_path / "cpu" / "job", GIB, GIB)
    (cgroup,) = limiting_cgroups(
        "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
        [
            mounted(tmp_path / "memory", kind="cgroup", options="rw,memory"),
            mounted(tmp_path / "cpu", kind="cgroup", options="rw,cpu"),
        ],
    )
    assert cgroup.left == GIB + 7


def test_usage_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, str(GIB), usage=2 * GIB)
    assert [cgroup.left for cgroup in limiting_cgroups("0::/\n", [mounted(tmp_path)])] == [0]


@pytest.mark.parametrize("limit", ["max", "", "many"])
def test_cgroup_without_a_limit_does_not_bound(tmp_path: Path, limit: str) -> None:
    fill(tmp_path, limit)
    assert limiting_cgroups("0::/\n", [mounted(tmp_path)]) == []


def test_cgroup_that_cannot_be_read_does_not_bound(tmp_path: Path) -> None:
    assert limiting_cgroups("0::/x\n", [mounted(tmp_path)]) == []


# -- a real one -----------------------------------------------------------------------------------

ASK = """
import sys
from kvray.store.machine.capacity import limiting_cgroups
sys.stdin.read(1)
print([cgroup.limit for cgroup in limiting_cgroups()])
"""


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """A cgroup below this process's own, of 64 MiB, with one inside of it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a cgroup")
    for mount in mounts():
        if mount.kind == "cgroup" and "memory" in mount.options:
            outer, limit = mount.point / f"kvray-test-{os.getpid()}", "memory.limit_in_bytes"
            break
    else:
        pytest.skip("no memory controller of version 1 is mounted")
    inner = outer / "inner"
    inner.mkdir(parents=True)
    (outer / limit).write_text(str(64 * 2**20))
    yield inner
    inner.rmdir()
    outer.rmdir()


@pytest.mark.root
def test_limit_of_a_real_cgroup_holds_inside_of_it(real_cgroup: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        (real_cgroup / "cgroup.procs").write_text(str(process.pid))
        said, _ = process.communicate("x")
    assert said.strip() == f"[{64 * 2**20}]"


LISTED = """\
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684092k,huge=advise
36 31 0:35 /docker/a\\040b /mnt/a\\040b rw shared:5 master:1 - cgroup2 cgroup2 rw
"""


def test_a_mount_has_its_point_kind_and_options() -> None:
    shm, _ = mounts(LISTED)
    assert (shm.point, shm.kind, shm.device, shm.root) == (Path("/dev/shm"), "tmpfs", "0:23", "/")
    assert shm.options == ("rw", "size=24684092k", "huge=advise")


def test_blanks_in_paths_are_plain_and_optional_fields_are_passed_over() -> None:
    _, other = mounts(LISTED)
    assert (other.point, other.root, other.kind) == (Path("/mnt/a b"), "/docker/a b", "cgroup2")


def test_the_mount_of_a_path_is_the_nearest_above_it(tmp_path: Path) -> None:
    shm = mount_of(Path("/dev/shm"))
    assert shm is not None
    assert (shm.point, shm.kind) == (Path("/dev/shm"), "tmpfs")
    root = mount_of(tmp_path)
    assert root is None or tmp_path.is_relative_to(root.point)
