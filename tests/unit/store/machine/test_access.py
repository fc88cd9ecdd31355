"""Who may open what a tier makes: its own user, and the members of a group if one is named."""

import os
from dataclasses import replace

import pytest

from kvray.errors import ConfigError, ShardUnavailable
from kvray.store.machine.access import OWN_USER, Access
from kvray.store.nvme import NvmeStore
from kvray.store.nvme.disk import Disk
from tests.unit.store.nvme.small_store import spec

GROUP = 54321
"""Of nobody here; only root may give files to it."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


@pytest.mark.parametrize("group", ["no such group", "-1", "4294967295", "9" * 40, "a\0b", "", "²"])
def test_a_group_has_a_name_or_a_number_and_others_are_refused(group):
    assert Access.of("root") == Access.of("0") == Access(gid=0)
    assert Access.of(None) == OWN_USER
    with pytest.raises(ConfigError, match="no such group"):
        Access.of(group)


def test_own_directories_and_missing_ones_are_trusted_and_no_links(tmp_path):
    OWN_USER.check_trust(tmp_path)
    OWN_USER.check_trust(tmp_path / "none")
    OWN_USER.check_own(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ShardUnavailable, match="does not trust it"):
        OWN_USER.check_trust(tmp_path / "link")
    for call in (OWN_USER.check_own, lambda path: NvmeStore(path, spec())):
        with pytest.raises(ConfigError, match="is a link"):
            call(tmp_path / "link")


@needs_root
def test_a_directory_of_another_user_is_trusted_only_if_it_is_of_the_group(tmp_path):
    os.chown(tmp_path, 12345, GROUP)
    tmp_path.chmod(0o750)
    Access(gid=GROUP).check_trust(tmp_path)
    for access in (OWN_USER, Access(gid=GROUP + 1)):
        with pytest.raises(ShardUnavailable, match=r"belongs to user 12345.* arena\.group"):
            access.check_trust(tmp_path)
    tmp_path.chmod(0o770)  # any member may have put the arena there
    with pytest.raises(ShardUnavailable, match="mode 0770"):
        Access(gid=GROUP).check_trust(tmp_path)


@pytest.mark.parametrize(
    ("group", "modes"),
    [(None, (0o700, 0o600)), pytest.param(str(GROUP), (0o750, 0o660), marks=needs_root)],
)
def test_files_are_the_users_alone_or_a_groups_which_may_not_write_to_directories(
    tmp_path, group, modes
):
    before = os.umask(0)
    try:
        NvmeStore(tmp_path / "nvme", replace(spec(), group=group)).close()
        Disk(Access.of(group)).create(tmp_path / "nvme" / "file", 4096).close()
        other = tmp_path / "nvme" / "other"
        other.touch()
        Disk(Access.of(group)).open(other).close()
    finally:
        os.umask(before)
    made = [one.stat() for one in (tmp_path / "nvme", tmp_path / "nvme" / "file", other)]
    assert tuple(one.st_mode & 0o7777 for one in made) == (*modes, modes[1])
    assert group is None or {one.st_gid for one in made} == {GROUP}


@needs_root
def test_a_user_who_is_not_in_the_group_is_told_so(tmp_path):
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 12345, 12345)
    tmp_path.chmod(0o755)
    os.seteuid(12345)
    try:
        with pytest.raises(ConfigError, match=r"12345.* may not give files to the group 54321"):
            Access(gid=GROUP).give(tmp_path / "file")
    finally:
        os.seteuid(0)
