import os
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
        return forks.run([*map(str, args)], told, tmp_path)

    return run
