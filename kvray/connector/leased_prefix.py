"""A prefix that is leased for every rank of a replica, on whichever nodes they are; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvray.connector.meta import RankLeases
from kvray.store import Arena, Held, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPrefix:
    """Blocks of a prompt from its root; whoever has it ends its leases."""

    arena: Arena  # the leader's
    held: Held  # leases there, for its ranks on this node in their order
    away: Mapping[int, tuple[str, Lease]] = field(default_factory=dict)
    """Rank on another node -> its arena and its lease there, of as many blocks."""

    @property
    def num_blocks(self) -> int:
        """How many blocks are leased."""
        return self.held.num_blocks

    def leased(self) -> RankLeases:
        """Return the leases as the ranks are told of them."""
        here = self.arena.arena_id
        if not self.away:
            return RankLeases((here,), self.held.leases)
        num_ranks = len(self.held.leases) + len(self.away)
        own = iter(self.held.leases)
        places = [self.away.get(rank) or (here, next(own)) for rank in range(num_ranks)]
        arena_ids, leases = zip(*places, strict=True)
        return RankLeases(arena_ids, leases)
