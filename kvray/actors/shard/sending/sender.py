"""Has movers of other nodes fetch blocks that this node has, of memory and disk.

They fetch as for a prompt, so a block is there whole or not at all, and nothing waits for it. What
is gone when it is asked for is a miss. The functions below `Sender` are pure: they say which blocks
go first, and how they are asked for.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.actors.names import LOOKUP_NAME, lookup_name
from kvray.actors.ray_glue.arguments import in_pieces, packed
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.staging.peers import Peers, mover_of
from kvray.index import Run
from kvray.store import ArenaOwner
from kvray.store.arena.eviction import Rank, by_priority, leaves_first
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.retention import Retention, find_alike

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Sender:
    """Sends blocks of one shard to others; used by its event loop, raises as `Peers.call`."""

    def __init__(
        self,
        shard: str,
        owner: ArenaOwner,
        retention: Retention,
        peers: Peers,
        nvme: Callable[[], NvmeTier | None],
        *,
        num_partitions: int,
    ) -> None:
        self.shard = shard
        self.peers = peers
        self.owner = owner
        self.retention = retention
        self._nvme = nvme
        self._num_partitions = num_partitions

    async def targets(self) -> list[str]:
        """Return the other shards whose nodes stay."""
        return sorted(set(await self.peers.call(LOOKUP_NAME, "targets")) - {self.shard})

    def hottest(self) -> list[tuple[Tables, Array]]:
        """Return the blocks of the memory, then those on the disk only, hottest first.

        It ranks all blocks: not for the event loop's thread.
        """
        arena, nvme = self.owner.arena.tables, self._nvme()
        tiers = [(arena, hottest_first(arena, self.retention.rank))]
        if nvme is not None:
            store = nvme.store.tables
            slots = hottest_first(store, self.retention.rank_below)
            tiers.append((store, slots[find_alike(store, slots, arena) < 0]))
        return tiers

    async def held(self, tables: Tables, slots: Array, shards: frozenset[str]) -> Array:
        """Return a mask of the blocks that one of the `shards` has."""
        held = np.zeros(len(slots), dtype=bool)
        for mask in (await self.holders(tables, slots, shards)).values():
            held |= mask
        return held

    async def holders(
        self, tables: Tables, slots: Array, shards: frozenset[str]
    ) -> dict[str, Array]:
        """Return for those of the `shards` that have any of the blocks a mask of those it has."""
        found: dict[str, Array] = {}
        partitions = tables.slot_head[slots] % self._num_partitions
        for partition in np.unique(partitions).tolist():
            rows = np.flatnonzero(partitions == partition)
            keys = in_pieces(tables.slot_key[slots[rows]].tobytes())
            runs: list[Run] = await self.peers.call(lookup_name(partition), "locate", *keys)
            for shard, mask in held_by(runs, tables.slot_part[slots[rows]], shards).items():
                found.setdefault(shard, np.zeros(len(slots), dtype=bool))[rows] = mask
        return found

    async def send(
        self, tables: Tables, slots: Array, target: str, *, seconds: float, is_use: bool = False
    ) -> tuple[Array, str]:
        """Have a target fetch the blocks in `slots`, parents before their children, in time.

        `is_use` counts it as their use there. Returns those that the target has now, and why it has
        not all of them, if that is known.
        """
        if not len(slots):
            return slots, ""
        chains = chains_of(tables, slots)
        spans = tuple(span_of(tables, chain, mover_of(self.shard)) for chain in chains)
        order = FetchOrder(spans=spans, deadline_s=seconds, purpose="use" if is_use else "copy")
        nvme = self._nvme()
        if tables is not self.owner.arena.tables and nvme is not None:
            await nvme.reads.promote(order)  # movers read from memory only
        report: FetchReport = await self.peers.call_watched(
            mover_of(target), "fetch", *packed(order), work_s=seconds
        )
        faults = (f"{target}: {one.message}" for one in report.sources.values() if one.error)
        heads = [chain[:count] for chain, count in zip(chains, report.here, strict=True)]
        return np.concatenate(heads), next(faults, "")


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
