"""Maps ranks to the shards that they are registered with."""

from collections.abc import Iterable
from itertools import islice

RANKS_MAX = 4096  # ranks kept of one shard: far more than a node has


class RankDirectory:
    """Replica and rank -> shard. Of two shards that name a rank the later one counts."""

    def __init__(self) -> None:
        # Shard -> (replica, rank) -> number of the change that named it.
        self._ranks: dict[str, dict[tuple[str, int], int]] = {}
        self._changes = 0

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._ranks.values())

    def name(self, shard: str, ranks: Iterable[tuple[str, int]]) -> None:
        """Take all the ranks that are registered with `shard`."""
        named = set(islice(ranks, RANKS_MAX))
        self._changes += 1
        before = self._ranks.get(shard, {})
        self._ranks[shard] = {rank: before.get(rank, self._changes) for rank in named}

    def drop(self, shard: str) -> None:
        """Forget the ranks of `shard`."""
        self._ranks.pop(shard, None)

    def replica(self, replica: str, shards: Iterable[str]) -> dict[int, str]:
        """Return rank -> shard of the ranks of `replica`, as far as `shards` name them."""
        newest: dict[int, tuple[int, str]] = {}
        for shard in shards:
            for (name, rank), change in self._ranks.get(shard, {}).items():
                if name == replica:
                    newest[rank] = max(newest.get(rank, (-1, "")), (change, shard))
        return {rank: shard for rank, (_, shard) in sorted(newest.items())}
