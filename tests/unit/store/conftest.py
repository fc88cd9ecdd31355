"""Directories under /dev/shm, small arenas in them, and processes that share them."""

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvray.store import Arena
from kvray.store.arena.tables import Tables
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import make_arena, make_tables

ROOT = Path(__file__).parents[3]


class Child:
    """A process that evaluates what it is told; see `child.py`."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.store.child", str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "started"

    def say(self, line: str) -> str:
        """Have `line` evaluated; return the answer's repr."""
        self.tell(line)
        return self._answer()

    def tell(self, line: str) -> None:
        """Have `line` evaluated without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9 and reap; twice is fine."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(autouse=True)
def no_long_looks() -> Iterator[None]:
    """An owner rests after a long look at its blocks; on a starved machine each look is one."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own patches end before its directory
        patch.setattr("kvray.store.arena.owner._LONG_LOOK_S", math.inf)
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tables() -> Iterator[Tables]:
    """The tables of an empty arena, which no test may leave unsound."""
    made = make_tables()
    yield made
    check_invariants(made)


@pytest.fixture
def arena(directory: Path) -> Iterator[Arena]:
    """An arena of 8 slabs of 8 slots, of which this process is a holder; it stays sound."""
    made = make_arena(directory)
    made.join("test")
    yield made
    try:
        if made._tables is not None:  # the test has closed it
            check_invariants(made.tables)
    finally:
        made.close()


@pytest.fixture
def child(directory: Path) -> Iterator[Callable[[], Child]]:
    """Starts processes that share the test's directory, and ends them."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(directory))
        return children[-1]

    yield start
    for one in children:
        one.kill()


@pytest.fixture
def other(child: Callable[[], Child]) -> Child:
    """Another process that shares the directory, and the arena if that was there before."""
    return child()
