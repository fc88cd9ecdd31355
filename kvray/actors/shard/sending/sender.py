"""Has movers of other nodes fetch blocks that this node has, of memory and disk.

They fetch as for a prompt, so a block is there whole or not at all, and nothing waits for it. What
is gone when it is asked for is a miss.
"""

from collections.abc import Callable

import numpy as np

from kvray.actors.mover.orders import FetchOrder, FetchReport
from kvray.actors.names import LOOKUP_NAME, lookup_name
from kvray.actors.ray_glue.arguments import in_pieces, packed
from kvray.actors.shard.nvme_tier import NvmeTier
from kvray.actors.shard.sending.choice import (
    chains_of,
    held_by,
    hottest_first,
    span_of,
)
from kvray.actors.staging.peers import Peers, mover_of
from kvray.index import Run
from kvray.store import ArenaOwner
from kvray.store.arena.tables import Array, Tables
from kvray.store.retention import Retention, find_alike


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
        """Send blocks of memory and disk."""
        self.shard = shard
        self.peers = peers
        self._owner = owner
        self._retention = retention
        self._nvme = nvme
        self._num_partitions = num_partitions

    async def targets(self) -> list[str]:
        """Return the other shards whose nodes stay."""
        return sorted(set(await self.peers.call(LOOKUP_NAME, "targets")) - {self.shard})

    def hottest(self) -> list[tuple[Tables, Array]]:
        """Return the blocks of the memory, then those on the disk only, hottest first.

        It ranks all blocks: not for the event loop's thread.
        """
        arena, nvme = self._owner.arena.tables, self._nvme()
        tiers = [(arena, hottest_first(arena, self._retention.rank))]
        if nvme is not None:
            store = nvme.store.tables
            slots = hottest_first(store, self._retention.rank_below)
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

    def were_used(self, slots: Array, *, since: float) -> Array:
        """Return a mask of the `slots` of the memory that were used `since` then, monotonic."""
        counts, used_at = self._retention.uses.of(slots)
        used: Array = (counts > 0) & (used_at >= since)
        return used

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
        if tables is not self._owner.arena.tables and nvme is not None:
            await nvme.reads.promote(order)  # movers read from memory only
        report: FetchReport = await self.peers.call_watched(
            mover_of(target), "fetch", *packed(order), work_s=seconds
        )
        faults = (f"{target}: {one.message}" for one in report.sources.values() if one.error)
        heads = [chain[:count] for chain, count in zip(chains, report.here, strict=True)]
        return np.concatenate(heads), next(faults, "")
