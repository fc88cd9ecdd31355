"""Does an arena fit? Each bound, its arithmetic, and the sentence; cgroups and mounts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvray.errors import CapacityError
from kvray.store.machine import capacity
from kvray.store.machine.capacity import Cgroup, MemoryClaims, Mount, limiting_cgroups, mounts
from tests.unit.store.mounted import huge_pages, run_mounted

GIB = 2**30

RAY = MemoryClaims(object_store_bytes=2 * GIB, threshold=0.9)


def has(monkeypatch: pytest.MonkeyPatch, **figures: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(**figures))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 100 GiB, 80 of them available, without cgroups, and a mount without a size."""
    has(monkeypatch, total=100 * GIB, available=80 * GIB)
    monkeypatch.setattr(capacity, "limiting_cgroups", list)
    monkeypatch.setattr(capacity, "read_mount", lambda directory: None)


def check(directory: Path, size: int, claims: MemoryClaims | None = None) -> None:
    """Ask for room beside tables of half a GiB."""
    capacity.check_room(directory, size, claims, largest=lambda room: max(0, room - GIB // 2))


def refusal(directory: Path, size: int, claims: MemoryClaims | None = None) -> str:
    with pytest.raises(CapacityError) as caught:
        check(directory, size, claims)
    return str(caught.value)


def test_what_is_available_bounds(tmp_path):
    check(tmp_path, 80 * GIB)
    assert refusal(tmp_path, 81 * GIB) == (
        "The arena needs 81.00GiB, but 80.00GiB of the machine's 100.00GiB are available;"
        " lower arena.capacity to 79.4GiB."
    )


def test_figures_that_look_equal_have_their_difference_beside_them(tmp_path, monkeypatch):
    has(monkeypatch, total=GIB, available=60 << 20)
    said = refusal(tmp_path, (60 << 20) + 12288)
    assert said.startswith("The arena needs 0.06GiB (12KiB too much), but 0.06GiB of the machine's")


def test_ray_s_threshold_bounds_with_its_object_store_filled(tmp_path):
    check(tmp_path, 68 * GIB, RAY)
    assert refusal(tmp_path, 69 * GIB, RAY) == (
        "The arena needs 69.00GiB, but Ray kills workers above 0.9 x 100.00GiB = 90.00GiB, of which"
        " 20.00GiB are in use, less 2.00GiB that Ray's object store may still take; lower"
        " arena.capacity to 67.4GiB, give Ray a smaller object store or raise"
        " RAY_memory_usage_threshold."
    )


def make_cgroup(*, limit: int, usage: int, is_root: bool = True, **cache: int) -> Cgroup:
    cache = {"idle_cache": 0, "active_cache": 0, **cache}
    path = Path("/sys/fs/cgroup")
    return Cgroup(path=path, is_root=is_root, limit=limit * GIB, usage=usage * GIB, **cache)


def test_ray_takes_the_limit_of_a_container_for_the_node_s_memory(tmp_path, monkeypatch):
    container = make_cgroup(limit=10, usage=4, idle_cache=GIB, active_cache=GIB // 2)
    monkeypatch.setattr(capacity, "limiting_cgroups", lambda: [container])
    check(tmp_path, 4 * GIB + GIB // 2, RAY)
    said = refusal(tmp_path, 5 * GIB, RAY)
    assert "0.9 x 10.00GiB = 9.00GiB, of which 2.50GiB are in use, less 2.00GiB" in said


def test_ray_sees_no_cgroups_but_a_container_s_and_every_one_bounds(tmp_path, monkeypatch):
    own = [make_cgroup(limit=50, usage=1, is_root=False)]
    monkeypatch.setattr(capacity, "limiting_cgroups", lambda: own)
    check(tmp_path, 47 * GIB, RAY)
    said = refusal(tmp_path, 48 * GIB, RAY)
    assert "the cgroup /sys/fs/cgroup leaves 49.00GiB of its limit of 50.00GiB, less" in said
    own.append(make_cgroup(limit=3, usage=2))
    check(tmp_path, GIB)
    assert "leaves 1.00GiB of its limit of 3.00GiB; lower" in refusal(tmp_path, 2 * GIB)


def test_small_arenas_are_named_in_MiB_and_none_where_nothing_fits(tmp_path, monkeypatch):
    claims = MemoryClaims(object_store_bytes=90 * GIB, threshold=0.9)
    assert "; free memory, give Ray" in refusal(tmp_path, GIB, claims)
    has(monkeypatch, total=GIB, available=GIB)
    assert "lower arena.capacity to 448MiB." in refusal(tmp_path, 2 * GIB)


def test_workers_get_what_the_tightest_bound_leaves_less_rays_own_processes():
    memory = capacity.NodeMemory(total=100 * GIB, available=80 * GIB)
    assert capacity.worker_bytes(memory, 60 * GIB, RAY) == 8 * GIB - 768 * 2**20
    assert capacity.worker_bytes(memory, 70 * GIB, RAY) == 0


# -- cgroups and mounts ---------------------------------------------------------------------------


def at(point: Path, *, kind: str = "cgroup2", root: str = "/", options: str = "rw") -> Mount:
    return Mount(point=point, kind=kind, device="0:1", root=root, options=tuple(options.split(",")))


def fill(directory: Path, limit: str, usage: int = GIB, *, idle: int = 0, active: int = 0) -> None:
    stat = f"anon 1\ninactive_file {idle}\nactive_file {active}"
    write(directory, **{"memory.max": limit, "memory.current": usage, "memory.stat": stat})


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")


def test_own_cgroup_and_those_around_it_count(tmp_path):
    fill(tmp_path / "slice" / "own", str(2 * GIB))
    fill(tmp_path / "slice", str(3 * GIB))
    fill(tmp_path / "other", str(GIB))
    found = limiting_cgroups("0::/slice/own\n", [at(tmp_path)])
    assert [cgroup.limit for cgroup in found] == [2 * GIB, 3 * GIB]
    assert [cgroup.is_root for cgroup in found] == [False, False]


def test_cgroup_of_a_container_is_the_root_of_what_it_sees(tmp_path):
    fill(tmp_path, str(2 * GIB), idle=3, active=4)
    (cgroup,) = limiting_cgroups("0::/\n", [at(tmp_path)])
    assert (cgroup.is_root, cgroup.left) == (True, GIB + 3)
    assert (cgroup.idle_cache, cgroup.active_cache) == (3, 4)


@pytest.mark.parametrize(
    ("own", "root"),
    [
        ("/docker/abc/inner", "/docker/abc"),
        ("/docker/abc", "/docker/abc"),
        ("/elsewhere", "/docker/abc"),
        ("/../x", "/"),
    ],
)
def test_path_is_that_below_what_is_at_and_outside_of_it_the_mount_s_own(tmp_path, own, root):
    fill(tmp_path, str(4 * GIB))
    fill(tmp_path / "inner", "max")
    (cgroup,) = limiting_cgroups(f"0::{own}\n", [at(tmp_path, root=root)])
    assert cgroup.limit == 4 * GIB


def test_version_1_counts_where_its_controller_is_memory(tmp_path):
    for name, limit in (("memory/job", 2 * GIB), ("memory", 2**63 - 4096), ("cpu/job", GIB)):
        stat = "cache 1\ntotal_inactive_file 7"
        figures = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": GIB}
        write(tmp_path / name, **figures, **{"memory.stat": stat})
    seen = [at(tmp_path / name, kind="cgroup", options=f"rw,{name}") for name in ("memory", "cpu")]
    (cgroup,) = limiting_cgroups("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", seen)
    assert cgroup.left == GIB + 7


@pytest.mark.parametrize(("limit", "left"), [(str(GIB), [0]), ("max", []), ("", []), ("many", [])])
def test_usage_over_the_limit_leaves_nothing_and_no_limit_does_not_bound(tmp_path, limit, left):
    assert limiting_cgroups("0::/x\n", [at(tmp_path)]) == [], "it cannot be read"
    fill(tmp_path, limit, usage=2 * GIB)
    assert [cgroup.left for cgroup in limiting_cgroups("0::/\n", [at(tmp_path)])] == left


# -- a real cgroup --------------------------------------------------------------------------------

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
def test_limit_of_a_real_cgroup_holds_inside_of_it(real_cgroup):
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


def test_a_mount_has_its_point_kind_and_options_and_plain_paths():
    shm, other = mounts(LISTED)
    assert (shm.point, shm.kind, shm.device, shm.root) == (Path("/dev/shm"), "tmpfs", "0:23", "/")
    assert shm.options == ("rw", "size=24684092k", "huge=advise")
    assert (other.point, other.root, other.kind) == (Path("/mnt/a b"), "/docker/a b", "cgroup2")


def test_the_mount_of_a_path_is_the_nearest_above_it(tmp_path):
    shm = capacity.mount_of(Path("/dev/shm"))
    assert shm is not None
    assert (shm.point, shm.kind) == (Path("/dev/shm"), "tmpfs")
    root = capacity.mount_of(tmp_path)
    assert root is None or tmp_path.is_relative_to(root.point)


# -- on real mounts -------------------------------------------------------------------------------

REFUSED = """
from kvray.errors import CapacityError
from kvray.store import Arena, ArenaSpec
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=512 * MiB, slab=MiB, slot_min=65536, holders_max=4)
try:
    Arena.create(mounted, spec, lock_wait_s=1)
except CapacityError as error:
    said = str(error)
print(said)
assert not list(mounted.iterdir())
"""


NAMED = f"""{REFUSED}
import re
from dataclasses import replace
from kvray.config import parse_size
named = parse_size(re.search(r"capacity to (\\w+)", said)[1])
Arena.create(mounted, replace(spec, capacity=named), lock_wait_s=1).close()
assert named // MiB > 150
"""


@pytest.mark.root
@pytest.mark.parametrize("options", ["size=256m", "size=256m,huge=advise"])
def test_a_full_mount_bounds_and_the_capacity_that_is_named_can_be_had(options):
    said = run_mounted(NAMED, kind="tmpfs", options=options)
    assert said.startswith("The arena needs 0.5")
    assert "but 0.25GiB are free in" in said
    enlarged = r" or enlarge the mount \(`mount -o remount,size=1g /"
    assert re.search(rf"; lower arena\.capacity to 1\d\dMiB{enlarged}", said)


@pytest.mark.root
def test_the_pool_of_huge_pages_bounds_hugetlbfs():
    with huge_pages(100):
        said = run_mounted(REFUSED, kind="hugetlbfs", options="pagesize=2M")
    assert "of the machine's huge pages; lower arena.capacity to" in said
    assert "/nr_hugepages`." in said
