import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Done, Forks, RunKvray


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
