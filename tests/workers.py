"""Lets the workers of pytest-xdist run side by side: a /dev/shm each, and which tests share one."""

import ctypes
import os
import sys
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

_LANES = {
    "machine": "chaos dashboards drain kv_events page restart silence tensor_parallel two_nodes",
}
"""Name -> files of tests/ray for one worker: those on the machine of several nodes, and some with a
Ray of their own.

A second worker has all others, most of which share the session's Ray: so each lane takes equally
long. There are no more lanes than cores that a usual machine has: Rays that idle take them away.
"""
_LANE_OF = {f"test_{file}.py": lane for lane, files in _LANES.items() for file in files.split()}

LARGE = frozenset(
    {"local", "machine", "wired_machine", "steady", "silent", "silent_wired", "sizes", "spread"}
)
"""Fixtures that end with the last test of theirs, not with the session: Rays, and tiers on them."""
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
    """Have no worker begin with a long test when the others are done.

    Tests with the same large fixture stay together.
    """

    def place(item: pytest.Item) -> tuple[bool, list[str]]:
        names = getattr(item, "fixturenames", ())
        return item.get_closest_marker("ray") is None, sorted(LARGE.intersection(names))

    items.sort(key=place)


def end_large_fixtures(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End fixtures that the next test does not use: their Rays would take cores away."""
    used = LARGE.intersection(getattr(item, "fixturenames", ()))
    for name in used.difference(getattr(nextitem, "fixturenames", ())):
        (definition,) = item._fixtureinfo.name2fixturedefs[name]  # type: ignore[attr-defined]
        definition.finish(item._request)  # type: ignore[attr-defined]


class ByLane(LoadScopeScheduling):
    """Gives a worker all tests of a lane or, without Ray, of a file.

    Groups by marks, pytest-xdist's own way, do nothing with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePath(nodeid.partition("::")[0])
        return _LANE_OF.get(path.name, "session's") if path.parent.name == "ray" else str(path)
