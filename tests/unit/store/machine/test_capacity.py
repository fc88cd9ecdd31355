"""Does an arena fit? Each bound, its arithmetic, and the sentence."""

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvray.errors import CapacityError
from kvray.store.machine import capacity
from kvray.store.machine.capacity import (
    Cgroup,
    MemoryClaims,
    NodeMemory,
    check_room,
    worker_bytes,
)
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


def largest(room: int) -> int:
    """Stand for tables of half a GiB."""
    return max(0, room - GIB // 2)


def check(directory: Path, size: int, claims: MemoryClaims | None = None) -> None:
    check_room(directory, size, claims, largest=largest)


def refusal(directory: Path, size: int, claims: MemoryClaims | None = None) -> str:
    with pytest.raises(CapacityError) as caught:
        check(directory, size, claims)
    return str(caught.value)


def test_what_just_fits_passes(tmp_path: Path) -> None:
    check(tmp_path, 80 * GIB)


def test_what_is_available_bounds(tmp_path: Path) -> None:
    assert refusal(tmp_path, 81 * GIB) == (
        "The arena needs 81.00GiB, but 80.00GiB of the machine's 100.00GiB are available;"
        " lower arena.capacity to 79.4GiB."
    )


def test_ray_s_threshold_bounds_with_its_object_store_filled(tmp_path: Path) -> None:
    check(tmp_path, 68 * GIB, RAY)
    assert refusal(tmp_path, 69 * GIB, RAY) == (
        "The arena needs 69.00GiB, but Ray kills workers above 0.9 x 100.00GiB = 90.00GiB, of which"
        " 20.00GiB are in use, less 2.00GiB that Ray's object store may still take; lower"
        " arena.capacity to 67.4GiB, give Ray a smaller object store or raise"
        " RAY_memory_usage_threshold."
    )


def test_ray_takes_the_limit_of_a_container_for_the_node_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = make_cgroup(limit=10 * GIB, usage=4 * GIB, idle_cache=GIB, active_cache=GIB // 2)
    monkeypatch.setattr(capacity, "limiting_cgroups", lambda: [container])
    check(tmp_path, 4 * GIB + GIB // 2, RAY)
    said = refusal(tmp_path, 5 * GIB, RAY)
    assert "0.9 x 10.00GiB = 9.00GiB, of which 2.50GiB are in use, less 2.00GiB" in said


def test_ray_does_not_see_a_cgroup_that_is_none_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = make_cgroup(limit=50 * GIB, usage=GIB, is_root=False)
    monkeypatch.setattr(capacity, "limiting_cgroups", lambda: [nested])
    check(tmp_path, 47 * GIB, RAY)
    said = refusal(tmp_path, 48 * GIB, RAY)
    assert "the cgroup /sys/fs/cgroup leaves 49.00GiB of its limit of 50.00GiB, less" in said


def test_every_cgroup_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = make_cgroup(limit=3 * GIB, usage=2 * GIB)
    own = make_cgroup(limit=8 * GIB, usage=GIB, is_root=False)
    monkeypatch.setattr(capacity, "limiting_cgroups", lambda: [own, around])
    check(tmp_path, GIB)
    assert "leaves 1.00GiB of its limit of 3.00GiB; lower" in refusal(tmp_path, 2 * GIB)


def test_where_nothing_fits_no_capacity_is_named(tmp_path: Path) -> None:
    claims = MemoryClaims(object_store_bytes=90 * GIB, threshold=0.9)
    assert "; free memory, give Ray" in refusal(tmp_path, GIB, claims)


def test_a_small_arena_is_named_in_mebibytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, total=GIB, available=GIB)
    assert "lower arena.capacity to 448MiB." in refusal(tmp_path, 2 * GIB)


def test_workers_get_what_the_tightest_bound_leaves_less_rays_own_processes() -> None:
    memory = NodeMemory(total=100 * GIB, available=80 * GIB)
    assert worker_bytes(memory, 60 * GIB, RAY) == 8 * GIB - 768 * 2**20
    assert worker_bytes(memory, 70 * GIB, RAY) == 0


def make_cgroup(
    *, limit: int, usage: int, is_root: bool = True, idle_cache: int = 0, active_cache: int = 0
) -> Cgroup:
    return Cgroup(
        path=Path("/sys/fs/cgroup"),
        is_root=is_root,
        limit=limit,
        usage=usage,
        idle_cache=idle_cache,
        active_cache=active_cache,
    )


# -- on real mounts -------------------------------------------------------------------------------

REFUSED = """
from kvray.errors import CapacityError
from kvray.store import Arena, ArenaSpec
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=512 * MiB, slab=MiB, slot_min=65536, holders_max=4)
try:
    Arena.create(mounted, spec, lock_wait_s=1)
except CapacityError as error:
    print(error)
assert not list(mounted.iterdir())
"""


@pytest.mark.root
def test_a_full_mount_bounds() -> None:
    said = run_mounted(REFUSED, kind="tmpfs", options="size=256m")
    assert said.startswith("The arena needs 0.5")
    assert "but 0.25GiB are free in" in said
    mended = (
        r"; lower arena\.capacity to 1\d\dMiB or enlarge the mount \(`mount -o remount,size=1g /"
    )
    assert re.search(mended, said)


NAMED = """
import re
from dataclasses import replace
from kvray.config import parse_size
from kvray.errors import CapacityError
from kvray.store import Arena, ArenaSpec
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=512 * MiB, slab=MiB, slot_min=65536, holders_max=4)
try:
    Arena.create(mounted, spec, lock_wait_s=1)
except CapacityError as error:
    named = parse_size(re.search(r"capacity to (\\w+)", str(error))[1])
Arena.create(mounted, replace(spec, capacity=named), lock_wait_s=1).close()
print(named // MiB > 150)
"""


@pytest.mark.root
@pytest.mark.parametrize("options", ["size=256m", "size=256m,huge=advise"])
def test_the_capacity_that_a_refusal_names_can_be_had(options: str) -> None:
    assert run_mounted(NAMED, kind="tmpfs", options=options) == "True"


@pytest.mark.root
def test_the_pool_of_huge_pages_bounds_hugetlbfs() -> None:
    with huge_pages(100):
        said = run_mounted(REFUSED, kind="hugetlbfs", options="pagesize=2M")
    assert "of the machine's huge pages; lower arena.capacity to" in said
    assert "/nr_hugepages`." in said
