"""Directories under /dev/shm, small arenas in them, and processes that share them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvray.store import Arena
from kvray.store.arena.tables import Tables
from tests.unit.conftest import StartChild
from tests.unit.store.child import Child
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import make_arena, make_tables


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tables() -> Iterator[Tables]:
    """The tables of an empty arena, which no test may leave invalid."""
    made = make_tables()
    yield made
    check_invariants(made)


@pytest.fixture
def arena(directory: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """An arena of 8 slabs of 8 slots, of which this process is a holder; it stays valid.

    A test may parametrize it, indirectly, with another spec.
    """
    made = make_arena(directory, asked=getattr(request, "param", None))
    made.join("test")
    yield made
    try:
        if "tables" in vars(made):  # the test has not closed it
            check_invariants(made.tables)
    finally:
        made.close()


@pytest.fixture
def child(directory: Path, child_in: StartChild) -> Callable[[], Child]:
    """Starts processes that share the test's directory."""
    return partial(child_in, directory)


@pytest.fixture
def other(child: Callable[[], Child]) -> Child:
    """Another process that shares the directory, and the arena if that was there before."""
    return child()
