"""The host tier: a node's arena in shared memory, and what is decided over its tables."""

from kvray.store.arena.arena import Arena
from kvray.store.arena.file import ArenaSpec
from kvray.store.arena.lease import Held, Lease, Membership, PartRequest
from kvray.store.arena.owner import ArenaOwner
from kvray.store.arena.slots import Reservation

__all__ = [
    "Arena",
    "ArenaOwner",
    "ArenaSpec",
    "Held",
    "Lease",
    "Membership",
    "PartRequest",
    "Reservation",
]
