"""Which shard each rank of a replica is registered with, as the shards say."""

from collections.abc import Iterable
from itertools import islice

RANKS_MAX = 4096
"""Ranks of one shard that are kept: far more than a node has."""


class RankDirectory:
    """Replica and rank -> shard. A rank that two shards name is with the later one."""

    def __init__(self) -> None:
        """Start empty."""
        # Shard -> (replica, rank) -> the number of the change with which it was named.
        self._ranks: dict[str, dict[tuple[str, int], int]] = {}
        self._changes = 0

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._ranks.values())

    def name(self, shard: str, ranks: Iterable[tuple[str, int]]) -> None:
        """Take what `shard` says are all the ranks that are registered with it."""
        named = set(islice(ranks, RANKS_MAX))
        self._changes += 1
        before = self._ranks.get(shard, {})
        self._ranks[shard] = {rank: before.get(rank, self._changes) for rank in named}

    def drop(self, shard: str) -> None:
        """Forget the ranks of `shard`."""
        self._ranks.pop(shard, None)

    def replica(self, replica: str, shards: Iterable[str]) -> dict[int, str]:
        """Return rank -> shard of the ranks of `replica` that one of `shards` names."""
        newest: dict[int, tuple[int, str]] = {}
        for shard in shards:
            for (name, rank), change in self._ranks.get(shard, {}).items():
                if name == replica:
                    newest[rank] = max(newest.get(rank, (-1, "")), (change, shard))
        return {rank: shard for rank, (_, shard) in sorted(newest.items())}
