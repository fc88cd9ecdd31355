"""The other process of `kvray bench connector`: stores, leases, releases until its parent ends."""

import itertools
import select
import sys
from pathlib import Path

import numpy as np

from kvray.cli.bench.scale import TOKENS_PER_BLOCK
from kvray.keys import chain_keys, request_seed
from kvray.store import Arena

_NUM_BLOCKS = 32
_LOCK_WAIT_S = 1.0


def main() -> None:
    """Say `ready`, then work without a pause until the parent closes our standard input."""
    directory, block_bytes = Path(sys.argv[1]), int(sys.argv[2])
    arena = Arena(directory, lock_wait_s=_LOCK_WAIT_S)
    arena.join("bench neighbour")
    print("ready", flush=True)
    for chain in itertools.count():
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        _store_and_lease(arena, chain, block_bytes)
    arena.close()


def _store_and_lease(arena: Arena, chain: int, block_bytes: int) -> None:
    """Store one chain of blocks, find it again, and let go of it."""
    keys = chain_keys(
        np.full(_NUM_BLOCKS * TOKENS_PER_BLOCK, chain),
        tokens_per_block=TOKENS_PER_BLOCK,
        seed=request_seed(b"kvray bench neighbour"),
    )
    made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=block_bytes)
    if made is not None:
        pool = np.zeros((len(made.slots), block_bytes), dtype=np.uint8)
        arena.commit(made, arena.write(made, pool, np.arange(len(made.slots))))
    leases = arena.lease(keys)
    arena.release(*leases or ())


if __name__ == "__main__":
    main()
