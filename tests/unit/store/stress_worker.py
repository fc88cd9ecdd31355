"""A process of the stress test: stores, leases, reads and verifies until it is killed.

Run as `python -m tests.unit.store.stress_worker DIRECTORY SEED`; it ends by itself only when
something is wrong, with a traceback.
"""

import random
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

from kvray.block import BlockKey
from kvray.store import Arena
from tests.unit.store.small_arena import SLOT, chain, fetch, pool_of

BLOCK_BYTES = (SLOT, SLOT, SLOT, 3 * SLOT)
"""Of the chains, in turn."""

NUM_CHAINS = 16
LENGTH = 40


@cache
def chain_number(number: int) -> list[BlockKey]:
    return chain(LENGTH, seed=f"stress {number}")


def main() -> None:
    arena = Arena(Path(sys.argv[1]), lock_wait_s=0.05)
    arena.join(f"worker {sys.argv[2]}")
    rng = random.Random(sys.argv[2])
    while True:
        number = rng.randrange(NUM_CHAINS)
        keys, size = chain_number(number), BLOCK_BYTES[number % len(BLOCK_BYTES)]
        length = rng.randint(1, LENGTH)
        if rng.random() < 0.6:
            save(arena, keys[:length], size, rng)
        else:
            load(arena, keys[:length], size, rng)


def save(arena: Arena, keys: list[BlockKey], size: int, rng: random.Random) -> None:
    """Store a chain whole or as a head and a tail; sometimes change one's mind."""
    cut = rng.choice((0, len(keys) // 2))
    parent = keys[cut - 1] if cut else None
    made = arena.reserve(keys[cut:], parent=parent, depth=cut, part=0, block_bytes=size)
    if made is None:
        return
    wanted = [keys[cut + row] for row in made.rows]
    sums = arena.write(made, pool_of(wanted, block_bytes=size), np.arange(len(wanted)))
    if rng.random() < 0.1:
        assert arena.abort(made)
    else:
        assert arena.commit(made, sums)


def load(arena: Arena, keys: list[BlockKey], size: int, rng: random.Random) -> None:
    leases = arena.lease(keys)
    if not leases:
        return
    if rng.random() < 0.3:
        time.sleep(0.003)
    assert fetch(arena, keys, leases[0], block_bytes=size), "wrong bytes"
    assert arena.release(*leases, wait_s=5.0)


if __name__ == "__main__":
    main()
