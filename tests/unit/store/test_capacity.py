"""Does an arena fit? The figures, where they come from, and the sentence."""

from pathlib import Path

import pytest

from kvray.errors import CapacityError
from kvray.store import capacity
from kvray.store.capacity import check_room

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup of version 2 in place of the machine's."""
    figures = (tmp_path, "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(capacity, "_CGROUPS", (figures,))
    return tmp_path


def fill(cgroup: Path, limit: str, usage: int, cache: int) -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{usage}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_what_fits_passes(tmp_path: Path) -> None:
    check_room(tmp_path, 4096)


def test_full_mount_is_named_with_its_figures(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs 1048576\.00GiB but free in .* is \d+\.\d\dGiB"):
        check_room(tmp_path, 2**50)


def test_cgroup_leaves_limit_less_usage(cgroup: Path) -> None:
    fill(cgroup, str(3 * GIB), 2 * GIB + GIB // 2, 0)
    with pytest.raises(CapacityError, match=r"needs 0\.75GiB but left by the cgroup is 0\.50GiB"):
        check_room(cgroup, 3 * GIB // 4)
    check_room(cgroup, GIB // 2)


def test_page_cache_of_the_cgroup_counts_as_free(cgroup: Path) -> None:
    fill(cgroup, str(3 * GIB), 3 * GIB, GIB)
    check_room(cgroup, GIB // 2)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_cgroup_without_a_limit_does_not_count(cgroup: Path, limit: str) -> None:
    fill(cgroup, limit, GIB, 0)
    check_room(cgroup, GIB // 2)


def test_cgroup_that_cannot_be_read_does_not_count(cgroup: Path) -> None:
    check_room(cgroup, 4096)


def test_available_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_available_memory", lambda: GIB // 4)
    with pytest.raises(CapacityError, match=r"available memory is 0\.25GiB; lower arena\.capacity"):
        check_room(tmp_path, GIB // 2)
