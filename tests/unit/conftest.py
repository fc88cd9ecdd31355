import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forks import Done, Forks, RunKvray, run
from tests.unit.store.child import Child
from tests.unit.store.fork_server import Workers

StartChild = Callable[[Path], Child]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def run_kvray(tmp_path: Path, forks: Forks) -> RunKvray:
    def run_kvray(*args: str | Path, **environ: str) -> Done:
        told = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120", **environ}
        if "PYTHONPATH" in environ:  # a fork has imported its own packages
            return run(sys.executable, "-m", "kvray", *args, env=told, cwd=tmp_path)
        return forks.run([*map(str, args)], told, tmp_path)

    return run_kvray


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory as arena.dir names one; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Workers]:
    """Starts children: an interpreter that imports the store costs half a second of CPU."""
    with Workers("child") as server:
        yield server


@pytest.fixture
def child_in(fork_server: Workers) -> Iterator[StartChild]:
    """Starts processes that share a directory, and the arena there, and ends them."""
    children: list[Child] = []

    def start(directory: Path) -> Child:
        children.append(Child(fork_server, directory))
        return children[-1]

    yield start
    for one in children:
        one.kill()
