"""Which blocks of a tier go to other nodes first, and how they are asked for; pure."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvray.actors.mover.orders import Span
from kvray.index import Run
from kvray.store.arena.eviction import Rank, by_priority, leaves_first
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables

_MIX = np.uint64(0x9E3779B97F4A7C15)


def hottest_first(tables: Tables, rank: Rank) -> Array:
    """Return the slots of all blocks that eviction would keep longest first.

    Parents come before their children. Blocks that were given up are left out. Needs no lock: what
    is not there any more when it is asked for is a miss.
    """
    slots = tables.slots_in(READY)
    slots = slots[tables.slot_tick[slots] > 0]
    parents = tables.parents(slots)
    num_children = np.bincount(parents[parents >= 0], minlength=tables.geometry.num_slots)
    order = np.lexsort((rank(slots), by_priority(tables, slots)))
    places = np.empty(len(slots))
    places[order] = np.arange(len(slots))
    going = leaves_first(
        slots,
        places,
        parents=parents,
        num_children=num_children[slots],
        depths=tables.slot_depth[slots],
    )
    return going[::-1]


def shared_out(tables: Tables, slots: Array, num_targets: int) -> list[Array]:
    """Return which of `slots` each target gets, in their order; a chain goes to one of them."""
    heads = tables.slot_head[slots].astype(np.int64)
    # A block whose chain is not known goes by its own key.
    own = (tables.slot_key[slots, 0] % num_targets).astype(np.int64)
    targets = np.where(heads > 0, heads % num_targets, own)
    return [slots[targets == target] for target in range(num_targets)]


def batches(tables: Tables, slots: Array, *, bytes_max: int, blocks_max: int) -> Iterator[Array]:
    """Yield `slots` in pieces of at most so many bytes (one block at least) and blocks."""
    ends = np.cumsum(tables.block_bytes(slots))
    start = 0
    while start < len(slots):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bytes_max, side="right"))
        stop = min(max(stop, start + 1), start + blocks_max)
        yield slots[start:stop]
        start = stop


def held_by(runs: Sequence[Run], parts: Array, shards: frozenset[str]) -> dict[str, Array]:
    """Return for each of `shards` that is in `runs` a mask of the blocks whose part it has."""
    held: dict[str, Array] = {}
    start = 0
    for run in runs:
        here = parts[start : run.stop].tolist()
        for shard in shards & run.holders.keys():
            mask = held.setdefault(shard, np.zeros(len(parts), dtype=bool))
            mask[start : run.stop] = [run.holders[shard] >> part & 1 for part in here]
        start = run.stop
    return held


def chains_of(tables: Tables, slots: Array) -> list[Array]:
    """Return `slots`, parents before children, as chains of blocks that follow each other."""
    chains: list[list[int]] = []
    ends: dict[int, list[int]] = {}
    for slot, parent in zip(slots.tolist(), tables.parents(slots).tolist(), strict=True):
        chain = ends.pop(parent, None)
        if chain is None:
            chains.append(chain := [])
        chain.append(slot)
        ends[slot] = chain
    return [np.array(chain) for chain in chains]


def names_of(tables: Tables, slots: Array) -> Array:
    """Return a number for each block, u64, from the first word of its key and its part."""
    parts = tables.slot_part[slots].astype(np.uint64)
    names: Array = tables.slot_key[slots, 0] ^ (parts * _MIX)
    return names


def span_of(tables: Tables, chain: Array, source: str) -> Span:
    """Return the blocks of a chain as the mover `source` has them.

    If their parents stay behind, or are on a third node, they are useful there too.
    """
    first = int(chain[0])
    parent = int(tables.parents(chain[:1])[0])
    return Span(
        source=source,
        part=int(tables.slot_part[first]),
        keys=tables.slot_key[chain].tobytes(),
        parent=tables.slot_key[parent].tobytes() if parent >= 0 else b"",
        depth=int(tables.slot_depth[first]),
        head=int(tables.slot_head[first]),
        needs_parent=False,
        block_bytes=int(tables.block_bytes(chain[:1])[0]),
        namespace=int(tables.slot_namespace[first]),
    )
