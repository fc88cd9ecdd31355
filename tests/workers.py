"""Lets the workers of pytest-xdist run side by side: a /dev/shm each, and which tests share one."""

import ctypes
import os
import sys

import pytest

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


def group(items: list[pytest.Item]) -> None:
    """Put long tests first, and keep those of a file, or of the session's Ray, on one worker."""
    for item in items:
        shares_ray = "local" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("local-ray" if shares_ray else item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
