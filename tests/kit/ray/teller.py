"""A process that stays connected to a tier's Ray and says what `kvray status --json` would.

Run as `python -m tests.kit.ray.teller CONFIG`. It answers each line of its standard input with one
line. A command for each question would cost a core more than a second.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvray.client import Client
from kvray.config import load_config
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]


class Teller:
    """The process of that kind that a test asks."""

    def __init__(self, config_path: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.ray.teller", str(config_path)],
            cwd=ROOT,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=HANG_S)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there what it likes
    with Client(load_config(Path(sys.argv[1]))) as client:
        for _ in sys.stdin:
            print(json.dumps(client.status()), file=answers, flush=True)


if __name__ == "__main__":
    main()
