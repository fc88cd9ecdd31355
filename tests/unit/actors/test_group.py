"""A running shard's files have the modes that docs/security.md says, and let in whom it says.

As root, other processes become engines of other users.
"""

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.actors.conftest import StartShard
from tests.waiting import wait_for

GROUP, MEMBER = 54321, 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")

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
        print("stored by", link._socket.call("hello", timeout_s=5)["shard"])
    link.detach()
    """
)


@pytest.fixture
def serve(make_shard: StartShard, directory: Path) -> Iterator[StartShard]:
    """Starts shards where every user may come in, as to /dev/shm, and whatever the umask."""
    directory.parent.chmod(0o1777)
    before = os.umask(0)
    yield make_shard
    os.umask(before)


def engine(directory: Path, *, user: int, group: int = GROUP, access: str = str(GROUP)) -> str:
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


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param(None, ("0700", "0600", "0600", "0600"), id="the user's alone"),
        pytest.param(
            *(str(GROUP), ("0750", "0660", "0660", "0660")),
            marks=needs_root,
            id="members of the group open what engines need",
        ),
    ],
)
def test_files_have_the_modes_of_the_documentation(serve, directory, group, expected):
    if group is None:
        directory.mkdir(mode=0o777)  # others could enter before
    serve(group=group)
    shared = dict(zip((".", "arena", "lock", "socket"), expected, strict=True))
    assert modes(directory) == shared | {"owner": "0600", "owner.json": "0600"}


@needs_root
@pytest.mark.parametrize("group", [None, str(GROUP)])
def test_a_user_of_no_group_is_told_in_a_sentence(serve, directory, group):
    serve(group=group)
    for access in ("", str(GROUP)):
        said = engine(directory, user=MEMBER, group=MEMBER, access=access)
        assert "the engine goes on without" in said
        assert "arena.group" in said
        assert "stored" not in said


@needs_root
def test_an_arena_that_another_user_has_laid_is_not_trusted(serve, directory):
    serve(group=None)
    for path in [directory, *directory.iterdir()]:
        os.chown(path, MEMBER, MEMBER)
        path.chmod(0o777)
    assert "does not trust it" in engine(directory, user=MEMBER + 1)
    os.chown(directory, 0, 0)


@needs_root
def test_the_next_shard_lets_a_group_into_the_arena_that_it_adopts(serve, directory):
    serve(group=None).stop(retire=False, timeout_s=10)
    shard = serve(group=str(GROUP))
    assert modes(directory)["arena"] == "0660"
    assert engine(directory, user=MEMBER) == "stored by a\n"
    assert shard.status()["arena"]["blocks"] == 1
    wait_for(lambda: shard.status()["arena"]["holders"] <= 1, "the engine's end")
