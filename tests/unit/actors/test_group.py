"""A running shard's files have the modes that docs/security.md says, and let in whom it says.

As root, other processes become engines of other users.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvray.actors.shard.shard import Shard
from tests.unit.actors.small_shard import Line, settings_for, wait_until_serving
from tests.waiting import wait_for

GROUP, MEMBER = 54321, 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")

Start = Callable[[str | None], Shard]

_ENGINE = textwrap.dedent(
    """
    import logging, os, sys
    from pathlib import Path
    from kvray import node
    from kvray.store.machine.access import Access
    directory, user, group, access = sys.argv[1:]
    os.setgroups([int(group)])
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    link = node.attach(
        Path(directory), label="e", lock_wait_s=5.0, attach_retry_s=60.0,
        access=Access.of(access or None),
    )
    if link.arena is not None:
        found = link.arena.reserve(
            [b"k" * 32], parent=None, depth=0, part=0, block_bytes=4096, wait_s=5.0
        )
        link.arena.commit(found, link.arena.sums(found))
        print("stored by", link.call("hello")["shard"])
    link.detach()
    """
)


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory that every user may come into, as /dev/shm is."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(parent: Path) -> Iterator[Start]:
    shards: list[Shard] = []

    def start(group: str | None) -> Shard:
        shard = Shard("s", settings_for(parent / "node", group=group), [Line().announce])
        shards.append(shard)
        shard.start()
        return shard

    before = os.umask(0)
    yield start
    os.umask(before)
    for shard in shards:
        shard.stop(retire=True, timeout_s=10)


def engine(directory: Path, *, user: int, group: int, access: str = "") -> str:
    """Attach to a tier as another user; return what that process printed."""
    command = [sys.executable, "-c", _ENGINE, str(directory), str(user), str(group), access]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout


def modes(directory: Path) -> dict[str, str]:
    """Return the mode of a directory and of what is in it, arena and lock without their ids."""
    found = {
        path.name.split(".")[0] if path.name != "owner.json" else path.name: path.lstat()
        for path in directory.iterdir()
    }
    found["."] = directory.lstat()
    return {name: f"{stat.S_IMODE(one.st_mode):04o}" for name, one in found.items()}


def test_files_are_the_users_alone_whatever_the_umask(parent, start):
    wait_until_serving(start(None))
    assert modes(parent / "node") == {
        ".": "0700",
        "arena": "0600",
        "lock": "0600",
        "socket": "0600",
        "owner": "0600",
        "owner.json": "0600",
    }


@needs_root
def test_with_a_group_its_members_may_open_what_engines_need(parent, start):
    wait_until_serving(start(str(GROUP)))
    assert modes(parent / "node") == {
        ".": "0750",
        "arena": "0660",
        "lock": "0660",
        "socket": "0660",
        "owner": "0600",
        "owner.json": "0600",
    }


@needs_root
def test_a_member_of_the_group_stores_and_speaks_to_the_shard(parent, start):
    shard = start(str(GROUP))
    wait_until_serving(shard)
    said = engine(parent / "node", user=MEMBER, group=GROUP, access=str(GROUP))
    assert said == "stored by s\n"
    arena = shard.status()["arena"]
    assert arena["blocks"] == 1
    wait_for(lambda: shard.status()["arena"]["holders"] <= 1, "the engine's end")


@needs_root
@pytest.mark.parametrize("group", [None, str(GROUP)])
def test_a_user_of_no_group_is_told_in_a_sentence(parent, start, group):
    wait_until_serving(start(group))
    for access in ("", str(GROUP)):
        said = engine(parent / "node", user=MEMBER, group=MEMBER, access=access)
        assert "the engine goes on without" in said
        assert "arena.group" in said
        assert "stored" not in said


@needs_root
def test_an_arena_that_another_user_has_laid_is_not_trusted(parent, start):
    wait_until_serving(start(None))
    for path in [parent / "node", *(parent / "node").iterdir()]:
        os.chown(path, MEMBER, MEMBER)
        path.chmod(0o777)
    said = engine(parent / "node", user=MEMBER + 1, group=GROUP, access=str(GROUP))
    assert "does not trust it" in said
    os.chown(parent / "node", 0, 0)


@needs_root
def test_the_next_shard_lets_a_group_into_the_arena_that_it_adopts(parent, start):
    shard = start(None)
    wait_until_serving(shard)
    shard.stop(retire=False, timeout_s=10)
    wait_until_serving(start(str(GROUP)))
    assert modes(parent / "node")["arena"] == "0660"
    said = engine(parent / "node", user=MEMBER, group=GROUP, access=str(GROUP))
    assert said == "stored by s\n"
