import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunKvray = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_kvray(tmp_path: Path) -> RunKvray:
    """Return a function that runs the command line with a temporary directory of its own."""

    def run(*args: str | Path, **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kvray", *map(str, args)],
            env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120", **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
