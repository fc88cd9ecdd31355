"""Pools and the tier of all replicas: the blocks in each, least recently used first out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvray.lab.replay.fleet.plan import FleetPlan
from kvray.routing import Lru, Stretch
from kvray.routing.cost import Medium
from kvray.store.replay.trace import Trace


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
