"""What the leader tells all ranks for one pass: small, because every rank waits for it.

Slots and keys do not travel. A rank reads its slots from the lease record that a load names, and
the keys of a save from the key board (`key_board`); both lie in the node's arena. What is left are
4 bytes a block and layer group, the page; and 32 a saved block, its key, if ranks are on several
nodes. Classes are tuples because those pickle to the least.
"""

from typing import NamedTuple

import numpy as np

from kvray.store import Lease
from kvray.store.tables import Array


class Pages(NamedTuple):
    """Page ids of consecutive blocks of one request, -1 where a block has no page."""

    packed: bytes
    """i32 each, little endian."""

    @classmethod
    def of(cls, page_ids: list[int]) -> "Pages":
        """Pack `page_ids`."""
        return cls(np.asarray(page_ids, dtype="<i4").tobytes())

    def ids(self) -> Array:
        """Return them as i64."""
        return np.frombuffer(self.packed, dtype="<i4").astype(np.int64)


class Leased(NamedTuple):
    """Where each rank has its lease of a prefix."""

    arena_ids: tuple[str, ...]
    """Of each rank; only one if all of them are on one node."""
    leases: tuple[Lease, ...]
    """One a rank, which reads by its own and releases it."""

    def of(self, rank: int) -> tuple[str, Lease]:
        """Return the arena and the lease of a rank."""
        return self.arena_ids[rank if len(self.arena_ids) > 1 else 0], self.leases[rank]


class Release(NamedTuple):
    """A lease that a rank is to end, as nobody will read by it; the leader cannot from its node."""

    rank: int
    arena_id: str
    lease: Lease


class LoadPlan(NamedTuple):
    """Blocks of one request to be copied from leased slots before the pass."""

    request_id: int
    leased: Leased
    leased_blocks: int
    """Blocks of the prefix that is leased, from its root."""
    first: int
    """The first block to copy; those before are in the engine's pool."""
    pages: tuple[Pages, ...]
    """For each layer group the pages of the blocks from `first` on."""


class KeyRun(NamedTuple):
    """Keys on the leader's board."""

    start: int
    num_keys: int
    check: int
    """xxh3 of their bytes."""


class SavePlan(NamedTuple):
    """Full blocks of one request to be copied to the tier after the pass."""

    request_id: int
    depth: int
    """Place of the first block in its prompt."""
    keys: KeyRun | bytes
    """Of the block before the first, unless that is the prompt's first, and of each block; the
    keys themselves if ranks are on several nodes."""
    pages: tuple[Pages, ...]
    """For each layer group."""


class ParkPlan(NamedTuple):
    """A lease whose blocks every rank makes ready while the request waits."""

    request_id: int
    leased: Leased


class Board(NamedTuple):
    """Where the leader's key board is."""

    arena_id: str
    slots: tuple[int, ...]


class ConnectorMeta(NamedTuple):
    """The metadata of one pass, the same for every rank."""

    namespace: bytes = b""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    parks: tuple[ParkPlan, ...] = ()
    releases: tuple[Release, ...] = ()
    board: Board | None = None
    """There if saves have their keys on it."""
    is_fenced: bool = False
    """Whether pages that are being saved may be given to others from this pass on."""
    replica: str = ""
    """What the leader calls the replica."""
    priorities: tuple[bytes, ...] = ()
    """For each save the retention priorities of its blocks, one byte each, or none if they have the
    default; empty if all have."""
    tenants: tuple[int, ...] = ()
    """For each save what an arena knows its tenant by; empty if there are no tenants."""

    def __reduce__(self) -> tuple[type["ConnectorMeta"], tuple[object, ...]]:
        """Pickle to no more than is needed: hardly a request has priorities or a tenant."""
        without = 0 if self.tenants else 1 if self.priorities else 2
        return type(self), tuple(self)[: len(self) - without]
