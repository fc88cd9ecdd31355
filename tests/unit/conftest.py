import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forks import Done, Forks, RunKvray
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
    """Return a function that runs the command line with a temporary directory of its own."""

    def run(*args: str | Path, **environ: str) -> Done:
        told = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120", **environ}
        command = [*map(str, args)]
        if "PYTHONPATH" not in environ:
            return forks.run(command, told, tmp_path)
        command = [sys.executable, "-m", "kvray", *command]  # a fork has imported its own packages
        return subprocess.run(
            command, env=told, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


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
