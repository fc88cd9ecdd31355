"""The metadata that the leader sends to all ranks for one pass; every rank waits for it.

Slots do not travel: a rank reads those of a load from the lease record in the node's arena. A
block costs 4 bytes a layer group for its page, and 32 for its key if it is saved. Classes are
tuples because tuples have the smallest pickles.

A `Promise` is the leader's side of a load: tokens that the engine counts on, and their leases.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvray.errors import LeaseExpired
from kvray.store import Arena, Lease
from kvray.store.arena.tables import Array
from kvray.trace.arrival import Arrivals


class PageIds(NamedTuple):
    """Page ids of consecutive blocks of one request, -1 where a block has no page."""

    packed: bytes  # i32 each, little endian

    @classmethod
    def of(cls, page_ids: list[int]) -> "PageIds":
        """Pack `page_ids`."""
        return cls(struct.pack(f"<{len(page_ids)}i", *page_ids))

    @property
    def num_blocks(self) -> int:
        """How many blocks have an id, -1 included."""
        return len(self.packed) // 4

    def ids(self) -> Array:
        """Return them as i64."""
        return np.frombuffer(self.packed, dtype="<i4").astype(np.int64)


Place = tuple[str, Lease]
"""Where a rank has its lease of a prefix: the id of an arena, and the lease there."""


class Release(NamedTuple):
    """A lease on another node, which its rank must end: nobody will read by it."""

    rank: int
    arena_id: str
    lease: Lease


class LoadPlan(NamedTuple):
    """Blocks of one request to be copied from leased slots before the pass."""

    request_id: int
    leased: tuple[Place, ...]  # one a rank, which reads by its own and releases it
    leased_blocks: int  # blocks of the prefix that is leased, from its root
    first: int  # the first block to copy; those before are in the engine's pool
    pages: tuple[PageIds, ...]
    """For each layer group the pages of the blocks from `first` on."""
    stored_by: int  # ranks that the blocks' bytes are dealt to


class SavePlan(NamedTuple):
    """Full blocks of one request to be copied to the tier after the pass."""

    request_id: int
    depth: int  # place of the first block in its prompt
    keys: bytes
    """Of the block before the first, unless that is the prompt's first, and of each block."""
    pages: tuple[PageIds, ...]  # for each layer group
    priorities: bytes = b""
    """Retention priorities of the blocks, one byte each; empty if they have the default."""
    tenant_id: int = 0  # the tenant's number in an arena; 0: none


class ConnectorMeta(NamedTuple):
    """The metadata of one pass, the same for every rank."""

    namespace: bytes = b""
    """Digest of what every rank's pool must be: the namespace without the weights' version."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    releases: tuple[Release, ...] = ()
    is_fenced: bool = False
    """Whether pages that are being saved may be given to others from this pass on."""
    replica: str = ""  # the leader's name for the replica
    model: str = ""
    """With loads, the fingerprint in `namespace`, which a rank may not know yet."""
    number: int = 0
    """With saves, the number by which arenas know their namespace, weights' version included."""


Honoured = Callable[[], object]
"""Returns how many tokens of an offer the engine took; what is no whole number says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLease:
    """Blocks of a prompt from its root, for all ranks; whoever has it ends its leases, once."""

    arena: Arena  # the leader's
    leased: tuple[Place, ...]
    """One a rank. Those in other arenas were taken by the shards of other nodes."""
    num_blocks: int  # that are leased
    stored_by: int  # ranks that its blocks' bytes are dealt to
    end: int  # where its valid blocks end
    arrivals: Arrivals = ()
    """How its blocks came to this node, as far as they were not here."""

    @property
    def away(self) -> dict[int, Place]:
        """The places of ranks on other nodes."""
        here = self.arena.arena_id
        return {rank: place for rank, place in enumerate(self.leased) if place[0] != here}


@dataclass(slots=True, kw_only=True)
class Promise:
    """Matched tokens that the leader has offered to the engine and holds in leases."""

    lease: PrefixLease  # the whole of it, from its root
    tokens_per_block: int
    num_computed: int
    """Tokens that the engine had itself. A block that has only some of them is loaded whole."""
    end: int  # where the promised blocks end; leased blocks after it failed their checksum
    honoured: Honoured | None = None  # None: the engine takes all of an offer or nothing

    @property
    def first(self) -> int:
        """The first block to load."""
        return self.num_computed // self.tokens_per_block

    @property
    def num_blocks(self) -> int:
        """How many blocks were offered, the first perhaps in part."""
        return self.end - self.first

    @property
    def num_tokens(self) -> int:
        """How many tokens were offered."""
        return max(0, self.end * self.tokens_per_block - self.num_computed)

    def cancel(self, start: int, end: int) -> None:
        """Keep less: the engine will not use the tokens from `start` to `end`."""
        if end >= self.end * self.tokens_per_block:
            kept = -(-start // self.tokens_per_block) if start > self.num_computed else self.first
            self.end = min(self.end, max(self.first, kept))
        elif start <= self.num_computed:
            self.num_computed = max(self.num_computed, end)

    def taken(self, position: int, *, is_exact: bool) -> tuple[int, bool]:
        """Return how many blocks of the offer the engine counts on, and whether that is sure.

        If not, it may be less. `position` is that of the first report, without what the request
        took of the offer. `is_exact`: this engine takes all of an offer or nothing. LeaseExpired:
        the offer does not explain the position.
        """
        if position < self.num_computed:
            return 0, True  # it did not take the offer, and subtracts it all the same
        size, before = self.tokens_per_block, position - self.first * self.tokens_per_block
        if before >= size:
            raise LeaseExpired(
                f"The engine counts on {position} tokens of which it had {self.num_computed}"
                " itself, and the others were never promised to it; it must not go on with them."
            )
        noted = self.honoured() if self.honoured is not None and not is_exact else None
        if not isinstance(noted, int) or isinstance(noted, bool):
            return self.num_blocks, is_exact
        if noted <= 0:
            return 0, True
        blocks = min(-(-(before + noted) // size), self.num_blocks)
        return blocks, before + noted == blocks * size
