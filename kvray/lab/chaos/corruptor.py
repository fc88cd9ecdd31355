"""Damages an arena, in a process of its own, as another program's defect would.

Run as `python -m kvray.lab.chaos.corruptor flip DIRECTORY SEED COUNT`, which flips a byte in that
many complete blocks, or `... fill DIRECTORY SEED SECONDS`, which stores junk for that time.
"""

import contextlib
import random
import sys
import time
from pathlib import Path

import numpy as np

from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.store import Arena
from kvray.store.arena.layout import READY

_LOCK_WAIT_S = 1.0
_KEYS_AT_ONCE = 64
_PAUSE_S = 0.005


def main() -> None:
    """Run the command line."""
    verb, directory, seed, amount = sys.argv[1:5]
    damage = _flip if verb == "flip" else _fill
    with contextlib.closing(Arena(Path(directory), lock_wait_s=_LOCK_WAIT_S)) as arena:
        damage(arena, random.Random(int(seed)), float(amount))


def _flip(arena: Arena, random_: random.Random, count: float) -> None:
    """Flip one byte each in complete blocks, without taking a lease."""
    ready = arena.tables.slots_in(READY).tolist()
    for slot in random_.sample(ready, min(int(count), len(ready))):
        block = arena.slot_bytes(slot)
        block[random_.randrange(len(block))] ^= 0xFF


def _fill(arena: Arena, random_: random.Random, seconds: float) -> None:
    """Store junk under keys that nobody asks for, in blocks of the largest size in use."""
    arena.join("junk")
    sizes = arena.tables.slab_block_bytes
    block_bytes = int(sizes.max()) or arena.tables.geometry.slot_min
    pool = np.frombuffer(random_.randbytes(block_bytes), dtype=np.uint8)[None, :]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        keys = [BlockKey(random_.randbytes(KEY_BYTES)) for _ in range(_KEYS_AT_ONCE)]
        made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=block_bytes)
        if made is not None and len(made.slots):
            sums = arena.write(made, pool, np.zeros(len(made.slots), dtype=np.int64))
            arena.commit(made, sums)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
