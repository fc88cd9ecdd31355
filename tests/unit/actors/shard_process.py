"""A process with a shard and, as if it were an engine too, a lease and a reservation in its arena.

Run as `python -m tests.unit.actors.shard_process DIRECTORY NAME`; it ends when its standard input
does.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvray.actors.shard.shard import Shard
from tests.unit.actors.small_shard import Line, open_arena, settings_for, wait_until_serving
from tests.unit.store.small_arena import SLOT, chain, store

ROOT = Path(__file__).parents[3]
STORED, RESERVED = chain(4), chain(2, seed="reserved")

ShardProcess = subprocess.Popen[str]


@contextmanager
def shard_process(directory: Path, name: str) -> Iterator[ShardProcess]:
    """Give such a process once its shard serves; it is killed at the end."""
    command = [sys.executable, "-m", "tests.unit.actors.shard_process", str(directory), name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "serving\n"
            yield process
        finally:
            process.kill()


def main() -> None:
    directory, name = Path(sys.argv[1]), sys.argv[2]
    shard = Shard(name, settings_for(directory), [Line().announce])
    shard.start()
    wait_until_serving(shard)
    arena = open_arena(directory)
    store(arena, STORED)
    assert arena.lease(STORED)
    assert arena.reserve(RESERVED, parent=None, depth=0, part=0, block_bytes=SLOT)
    print("serving", flush=True)
    sys.stdin.read()
    shard.stop(retire=False, timeout_s=10)


if __name__ == "__main__":
    main()
