"""The host tier: a node's arena in shared memory, and what is decided over its tables."""

from kvray.store.arena import Arena, PartRead
from kvray.store.arena_file import ArenaSpec
from kvray.store.holders import Membership
from kvray.store.lease import Held, Lease, Wanted
from kvray.store.owner import ArenaOwner
from kvray.store.slots import Reservation

__all__ = [
    "Arena",
    "ArenaOwner",
    "ArenaSpec",
    "Held",
    "Lease",
    "Membership",
    "PartRead",
    "Reservation",
    "Wanted",
]
