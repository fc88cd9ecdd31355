"""What is replayed: replicas, their rates, the load, and their memory.

Pools and the tier of all replicas know the blocks in each, least recently used first out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvray.routing import Link, Lru, Rates, Stretch
from kvray.routing.cost import Medium
from kvray.store.replay.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Equal replicas, each on a node of its own, and the load that they get."""

    num_replicas: int
    pool_blocks: int
    """Of each replica's own pool."""
    host_blocks: int
    """Of each node's part of the tier."""
    disk_blocks: int = 0
    """Of each node's disk; 0: there is none."""
    rates: Rates
    speed: float = 1.0
    """The trace's times are divided by it."""
    deadline_s: float = 5.0
    """First tokens after it are no goodput."""
    seed: int = 0
    """Of the numbers that routers draw."""
    imbalance_max: int = 10
    """Difference of queue lengths above which `affinity` falls back to `pow2`."""

    def merged(self) -> FleetPlan:
        """Return the plan of one replica with the memory and the prefill rate of all."""
        count, rates = self.num_replicas, self.rates
        return replace(
            self,
            num_replicas=1,
            pool_blocks=count * self.pool_blocks,
            host_blocks=count * self.host_blocks,
            disk_blocks=count * self.disk_blocks,
            rates=replace(
                rates,
                prefill_tokens_per_s=count * rates.prefill_tokens_per_s,
                host=_faster(rates.host, count),
                disk=None if rates.disk is None else _faster(rates.disk, count),
            ),
        )


def _faster(link: Link, times: int) -> Link:
    return replace(link, bytes_per_s=times * link.bytes_per_s)


class Memory:
    """The pools of all replicas, their nodes' parts of the tier, and the index of the tier."""

    def __init__(self, trace: Trace, plan: FleetPlan) -> None:
        count = plan.num_replicas
        self.pools = [Lru[int](plan.pool_blocks) for _ in range(count)]
        self._hosts = [Lru[int](plan.host_blocks) for _ in range(count)]
        self._disks = [Lru[int](plan.disk_blocks) for _ in range(count)]
        # Masks of the nodes that have each block.
        self._in_host = [0] * trace.num_unique
        self._on_disk = [0] * trace.num_unique
        self._block_tokens = trace.block_tokens
        self._known: dict[tuple[int, int], dict[str, Medium]] = {}

    def stretches(self, ids: Sequence[int], num_tokens: int) -> list[Stretch]:
        """Return the prefix that the tier holds, as a lookup would say it."""
        runs: list[tuple[tuple[int, int], int]] = []
        for at, block in enumerate(ids):
            masks = self._in_host[block], self._on_disk[block]
            if masks == (0, 0):
                break
            tokens = min(self._block_tokens, num_tokens - at * self._block_tokens)
            if runs and runs[-1][0] == masks:
                tokens += runs.pop()[1]
            runs.append((masks, tokens))
        return [Stretch(num_tokens=tokens, holders=self._holders(masks)) for masks, tokens in runs]

    def use(self, replica: int, ids: Sequence[int]) -> None:
        """Note that a replica has just had a prompt's blocks: they are in its pool and its host."""
        bit = 1 << replica
        self.pools[replica].use(ids)
        gone = self._hosts[replica].use(ids)
        _set(self._in_host, bit, ids)
        _clear(self._in_host, bit, gone)
        # A block on disk stays there when it is promoted.
        _set(self._on_disk, bit, gone)
        again = [block for block in ids if block in self._disks[replica]]
        _clear(self._on_disk, bit, self._disks[replica].use([*gone[::-1], *again]))

    def _holders(self, masks: tuple[int, int]) -> dict[str, Medium]:
        found = self._known.get(masks)
        if found is None:
            found = {}
            for node in range(len(self.pools)):
                if masks[0] >> node & 1:
                    found[str(node)] = "host"
                elif masks[1] >> node & 1:
                    found[str(node)] = "disk"
            self._known[masks] = found
        return found


def _set(masks: list[int], bit: int, blocks: Iterable[int]) -> None:
    for block in blocks:
        masks[block] |= bit


def _clear(masks: list[int], bit: int, blocks: Iterable[int]) -> None:
    for block in blocks:
        masks[block] &= ~bit
