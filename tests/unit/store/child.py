"""A process of a test: evaluates the lines on its standard input and answers each with its repr.

Run as `python -m tests.unit.store.child DIRECTORY`; `arena` is the arena there.
"""

import os
import signal
import sys
import time
from pathlib import Path

from kvray.store import Arena, ArenaOwner
from kvray.store.machine.lock import ArenaLock
from kvray.store.machine.side_file import SideFile
from tests.unit.store import small_arena


def main() -> None:
    directory = Path(sys.argv[1])
    scope = {
        "ArenaLock": ArenaLock,
        "ArenaOwner": ArenaOwner,
        "Path": Path,
        "SideFile": SideFile,
        "directory": directory,
        "os": os,
        "signal": signal,
        "small": small_arena,
        "time": time,
    }
    if (directory / "arena").exists():
        scope["arena"] = Arena(directory, lock_wait_s=small_arena.PATIENT_S)
    print("started", flush=True)
    for line in sys.stdin:
        try:
            answer = repr(eval(line, scope))
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            answer = repr(error)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
