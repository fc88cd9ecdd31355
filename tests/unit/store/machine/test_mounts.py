from pathlib import Path

from kvray.store.machine.capacity import mount_of, mounts

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
