"""Lets the workers of pytest-xdist run side by side: a /dev/shm each, and which tests share one."""

import ctypes
import os
import sys
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

_SHARE = {
    "test_chaos_nodes.py": "machine",
    "test_other_disk.py": "machine",
    "test_spread_replica.py": "machine",
    "test_two_nodes.py": "machine",
    "test_frozen_pusher.py": "wired_machine",
    "test_silence.py": "wired_machine",
}
"""File -> the fixture of the session that it shares with others, and that takes long to make."""
_CLONE_NEWNS = 0x20000
_MS_PRIVATE_REC = 0x4000 | 0x40000


def take_own_shm() -> None:
    """Give this process, and what it starts, a /dev/shm that no other worker sees; needs root.

    Tests fail on files that others leave there, and arenas of one name would meet.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for status in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777,size=8g"),
    ):
        if status:
            sys.exit(f"a worker gets no /dev/shm: {os.strerror(ctypes.get_errno())}; use `-n 0`")


def put_long_ones_first(items: list[pytest.Item]) -> None:
    """Have no worker begin with a long test when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


class ByFile(LoadScopeScheduling):
    """Gives a worker all tests of a file, and of the files that share a fixture.

    Groups by marks, pytest-xdist's own way, do nothing with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _SHARE.get(PurePath(path).name, path)
