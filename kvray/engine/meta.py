"""The metadata that the leader sends to all ranks for one pass; every rank waits for it.

Slots do not travel: a rank reads those of a load from the lease record in the node's arena. A
block costs 4 bytes a layer group for its page, and 32 for its key if it is saved. Classes are
tuples because tuples have the smallest pickles.
"""

import struct
from typing import NamedTuple

import numpy as np

from kvray.store import Lease
from kvray.store.arena.tables import Array


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


class RankLeases(NamedTuple):
    """Where each rank has its lease of a prefix."""

    arena_ids: tuple[str, ...]  # of each rank; only one if all of them are on one node
    leases: tuple[Lease, ...]  # one a rank, which reads by its own and releases it

    def of(self, rank: int) -> tuple[str, Lease]:
        """Return the arena and the lease of a rank."""
        return self.arena_ids[rank if len(self.arena_ids) > 1 else 0], self.leases[rank]


class Release(NamedTuple):
    """A lease on another node, which its rank must end: nobody will read by it."""

    rank: int
    arena_id: str
    lease: Lease


class LoadPlan(NamedTuple):
    """Blocks of one request to be copied from leased slots before the pass."""

    request_id: int
    leased: RankLeases
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
