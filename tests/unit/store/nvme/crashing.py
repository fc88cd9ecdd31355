"""A process that stores, evicts, reads and flushes until it is killed.

Run as `python -m tests.unit.store.nvme.crashing DIRECTORY SEED`. It prints, one line each: `ready`
and the blocks that are found now; before what may evict, `may evict` and the blocks that may go, or
`*` for any.
"""

import random
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvray.store.arena import slabs
from kvray.store.nvme import NvmeStore
from tests.unit.store.nvme.small_store import (
    arena_tables,
    blocks_of,
    chain_for,
    open_store,
    promote,
    spec,
)
from tests.unit.store.small_arena import SLOT, chain, victims

SIZES = (SLOT, 2 * SLOT + 300)
CHAINS = {(part, size): chain(40, seed=f"{part} {size}") for part in range(4) for size in SIZES}
ASKED = spec(num_segments=6)

NAMES = {
    (key, part): f"{part}/{size}/{row}"
    for (part, size), keys in CHAINS.items()
    for row, key in enumerate(keys)
}


def say(what: str, names: Iterable[str]) -> None:
    # One write of the kernel: the reader never sees half a line but at the end.
    print(what, *sorted(names), sep="\t", flush=True)


def step(store: NvmeStore, chance: random.Random) -> None:
    kind = chance.choice(("store", "store", "store", "evict", "flush", "read"))
    (part, size), keys = chance.choice(list(CHAINS.items()))
    if kind == "store":
        until = chance.randrange(1, len(keys) + 1)
        if until > slabs.num_available(store.tables, size):
            say("may evict", "*")
        arena = arena_tables()
        store.write([chain_for(store, arena, keys[:until], part=part, block_bytes=size)], arena)
    elif kind == "evict":
        going = np.array(victims(store.tables, 25), dtype=np.int64)
        say("may evict", map(NAMES.__getitem__, blocks_of(store, going)))
        store.evict(going)
    elif kind == "flush":
        store.flush(note_use=chance.random() < 0.5)
    else:
        promote(store, keys, part=part, block_bytes=size)


def main() -> None:
    chance = random.Random(int(sys.argv[2]))
    store = open_store(Path(sys.argv[1]), ASKED)
    while True:
        say("ready", map(NAMES.__getitem__, blocks_of(store)))
        step(store, chance)


if __name__ == "__main__":
    main()
